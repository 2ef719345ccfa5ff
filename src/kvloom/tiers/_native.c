/* Checksums of a page's runs (XXH3, 64 bits, equal to the package xxhash): alone, or during a copy, a file read, or a
 * send or receive on a socket.
 * One call handles a page and releases Python's lock, so other threads read meanwhile; the package is called once per run.
 * encoding/checksums.py has the same functions without native code and serves where this file is not built: without a
 * compiler, or on a big-endian machine. Sizes are checked here, once per page. */
#define _FILE_OFFSET_BITS 64
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "checksums are read from memory in little-endian order"
#endif

/* One build for all processors of an architecture: the loader chooses among several versions of the loop. The widest
 * version is written by hand, because compilers do not generate it. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define WIDE __attribute__((target("avx512f")))
#define CLONES __attribute__((target_clones("avx2", "default")))
#else
#define CLONES
#endif

#define LANES 8
#define STRIPE 64                       /* bytes per step: 8 for each lane */
#define SECRET 192
#define STRIPES ((SECRET - STRIPE) / 8) /* per block: the secret advances 8 bytes per stripe */
#define BLOCK (STRIPES * STRIPE)
#define AHEAD 2048                      /* bytes to prefetch */
#define SHORTEST 241                    /* bytes: shorter inputs use another algorithm */

#define P32_1 0x9E3779B1u
#define P32_2 0x85EBCA77u
#define P32_3 0xC2B2AE3Du
#define P64_1 0x9E3779B185EBCA87u
#define P64_2 0xC2B2AE3D27D4EB4Fu
#define P64_3 0x165667B19E3779F9u
#define P64_4 0x85EBCA77C2B2AE63u
#define P64_5 0x27D4EB2F165667C5u

/* Constants of the algorithm. */
static const uint8_t secret[SECRET] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

static inline uint64_t word(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, 8);
    return value;
}

static inline void add_stripe(uint64_t *sums, const uint8_t *data, const uint8_t *key)
{
    for (int i = 0; i < LANES; i++) {
        uint64_t mixed = word(data + 8 * i) ^ word(key + 8 * i);
        sums[i] += word(data + 8 * (i ^ 1)) + (uint64_t)(uint32_t)mixed * (uint32_t)(mixed >> 32);
    }
}

CLONES static void add_all(uint64_t *sums, const uint8_t *data, size_t size)
{
    uint64_t lane[LANES];
    memcpy(lane, sums, sizeof lane);
    size_t blocks = (size - 1) / BLOCK;
    for (size_t b = 0; b < blocks; b++, data += BLOCK) {
        for (int s = 0; s < STRIPES; s++) {
            __builtin_prefetch(data + s * STRIPE + AHEAD);
            add_stripe(lane, data + s * STRIPE, secret + 8 * s);
        }
        for (int i = 0; i < LANES; i++)
            lane[i] = (lane[i] ^ lane[i] >> 47 ^ word(secret + SECRET - STRIPE + 8 * i)) * P32_1;
    }
    size_t rest = size - blocks * BLOCK;
    for (size_t s = 0; s < (rest - 1) / STRIPE; s++)
        add_stripe(lane, data + s * STRIPE, secret + 8 * s);
    add_stripe(lane, data + rest - STRIPE, secret + SECRET - STRIPE - 7);
    memcpy(sums, lane, sizeof lane);
}

#ifdef WIDE
WIDE static inline __m512i wide_stripe(__m512i lane, const uint8_t *data, const uint8_t *key)
{
    __m512i value = _mm512_loadu_si512(data), mixed = _mm512_xor_si512(value, _mm512_loadu_si512(key));
    lane = _mm512_add_epi64(lane, _mm512_shuffle_epi32(value, _MM_PERM_BADC));
    return _mm512_add_epi64(lane, _mm512_mul_epu32(mixed, _mm512_srli_epi64(mixed, 32)));
}

WIDE static void add_all_wide(uint64_t *sums, const uint8_t *data, size_t size)
{
    const __m512i prime = _mm512_set1_epi64(P32_1), last = _mm512_loadu_si512(secret + SECRET - STRIPE);
    __m512i lane = _mm512_loadu_si512(sums);
    size_t blocks = (size - 1) / BLOCK;
    for (size_t b = 0; b < blocks; b++, data += BLOCK) {
        for (int s = 0; s < STRIPES; s++) {
            __builtin_prefetch(data + s * STRIPE + AHEAD);
            lane = wide_stripe(lane, data + s * STRIPE, secret + 8 * s);
        }
        lane = _mm512_xor_si512(_mm512_xor_si512(lane, _mm512_srli_epi64(lane, 47)), last);
        __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(lane, 32), prime);
        lane = _mm512_add_epi64(_mm512_mul_epu32(lane, prime), _mm512_slli_epi64(high, 32));
    }
    size_t rest = size - blocks * BLOCK;
    for (size_t s = 0; s < (rest - 1) / STRIPE; s++)
        lane = wide_stripe(lane, data + s * STRIPE, secret + 8 * s);
    _mm512_storeu_si512(sums, wide_stripe(lane, data + rest - STRIPE, secret + SECRET - STRIPE - 7));
}
#endif

static void (*add)(uint64_t *, const uint8_t *, size_t) = add_all;

static uint64_t xxh3(const uint8_t *data, size_t size)
{
    uint64_t sums[LANES] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    add(sums, data, size);
    uint64_t result = size * P64_1;
    for (int i = 0; i < LANES; i += 2) {
        uint64_t low = sums[i] ^ word(secret + 11 + 8 * i), high = sums[i + 1] ^ word(secret + 19 + 8 * i);
        unsigned __int128 product = (unsigned __int128)low * high;
        result += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    result ^= result >> 37;
    result *= 0x165667919E3779F9u;
    return result ^ result >> 32;
}

/* Inputs below SHORTEST bytes have formulas of their own, by length; the seed is 0. */
static inline uint64_t fold(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t finish(uint64_t value)
{
    value ^= value >> 37;
    value *= 0x165667919E3779F9u;
    return value ^ value >> 32;
}

static inline uint64_t pair(const uint8_t *data, size_t at)
{
    return fold(word(data) ^ word(secret + at), word(data + 8) ^ word(secret + at + 8));
}

static inline uint64_t half(const uint8_t *at)
{
    uint32_t value;
    memcpy(&value, at, 4);
    return value;
}

static uint64_t xxh3_tiny(const uint8_t *data, size_t size)
{
    if (size > 8) {
        uint64_t low = word(data) ^ word(secret + 24) ^ word(secret + 32);
        uint64_t high = word(data + size - 8) ^ word(secret + 40) ^ word(secret + 48);
        return finish(size + __builtin_bswap64(low) + high + fold(low, high));
    }
    if (size > 3) {
        uint64_t value = half(data + size - 4) + (half(data) << 32);
        value ^= word(secret + 8) ^ word(secret + 16);
        value ^= (value << 49 | value >> 15) ^ (value << 24 | value >> 40);
        value *= 0x9FB21C651E98DF25u;
        value ^= (value >> 35) + size;
        value *= 0x9FB21C651E98DF25u;
        return value ^ value >> 28;
    }
    uint64_t value = word(secret + 56) ^ word(secret + 64);
    if (size) {
        value = (uint64_t)data[0] << 16 | (uint64_t)data[size >> 1] << 24 | data[size - 1] | size << 8;
        value ^= half(secret) ^ half(secret + 4);
    }
    value = (value ^ value >> 33) * P64_2;
    value = (value ^ value >> 29) * P64_3;
    return value ^ value >> 32;
}

static uint64_t xxh3_any(const uint8_t *data, size_t size)
{
    if (size >= SHORTEST)
        return xxh3(data, size);
    if (size <= 16)
        return xxh3_tiny(data, size);
    uint64_t sum = size * P64_1;
    if (size <= 128) {
        for (size_t i = 0; i < (size + 31) / 32; i++)
            sum += pair(data + 16 * i, 32 * i) + pair(data + size - 16 * (i + 1), 32 * i + 16);
        return finish(sum);
    }
    for (size_t i = 0; i < 8; i++)
        sum += pair(data + 16 * i, 16 * i);
    sum = finish(sum);
    for (size_t i = 8; i < size / 16; i++)
        sum += pair(data + 16 * i, 16 * (i - 8) + 3);
    return finish(sum + pair(data + size - 16, 136 - 17));
}

static PyObject *checksum(PyObject *self, PyObject *args)
{
    Py_buffer data;
    uint64_t result;
    if (!PyArg_ParseTuple(args, "y*", &data))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    result = xxh3_any(data.buf, (size_t)data.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLongLong(result);
}

/* Allocates the checksums of `size` bytes in runs of `run`; NULL and a ValueError unless they are whole runs. */
static PyObject *room(Py_ssize_t size, Py_ssize_t run)
{
    if (run < SHORTEST || size % run) {
        PyErr_Format(PyExc_ValueError, "%zd bytes are not whole runs of %zd, of %d at least", size, run, SHORTEST);
        return NULL;
    }
    return PyBytes_FromStringAndSize(NULL, size / run * 8);
}

static void sum_runs(const uint8_t *at, size_t size, size_t run, char *out)
{
    for (const uint8_t *end = at + size; at < end; at += run, out += 8) {
        uint64_t sum = xxh3(at, run);
        memcpy(out, &sum, 8);
    }
}

static PyObject *checksums(PyObject *self, PyObject *args)
{
    Py_buffer data;
    Py_ssize_t run;
    if (!PyArg_ParseTuple(args, "y*n", &data, &run))
        return NULL;
    PyObject *sums = room(data.len, run);
    if (sums != NULL) {
        char *out = PyBytes_AsString(sums);
        Py_BEGIN_ALLOW_THREADS
        sum_runs(data.buf, (size_t)data.len, (size_t)run, out);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    return sums;
}

/* Hashes each run while it is in the processor's cache. The caller chooses the bytes to hash: the source of a page that is
 * written, the copy of a page that is read. */
static PyObject *copy(PyObject *self, PyObject *args)
{
    Py_buffer to, from;
    Py_ssize_t run;
    int arrived;
    if (!PyArg_ParseTuple(args, "w*y*np", &to, &from, &run, &arrived))
        return NULL;
    PyObject *sums = NULL;
    if (to.len != from.len)
        PyErr_Format(PyExc_ValueError, "%zd bytes do not go into %zd", from.len, to.len);
    else if ((sums = room(to.len, run)) != NULL) {
        char *out = PyBytes_AsString(sums);
        uint8_t *into = to.buf;
        const uint8_t *at = from.buf, *end = at + from.len;
        Py_BEGIN_ALLOW_THREADS
        for (; at < end; at += run, into += run, out += 8) {
            memmove(into, at, (size_t)run); /* the two may overlap */
            uint64_t sum = xxh3(arrived ? into : at, (size_t)run);
            memcpy(out, &sum, 8);
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&to);
    PyBuffer_Release(&from);
    return sums;
}

/* Reads and hashes step by step, while the bytes are in the processor's cache; other threads read meanwhile. Stops at a
 * short read. */
static PyObject *read_runs(PyObject *self, PyObject *args)
{
    int fd;
    Py_buffer to;
    long long offset;
    Py_ssize_t run, step;
    if (!PyArg_ParseTuple(args, "iw*Lnn", &fd, &to, &offset, &run, &step))
        return NULL;
    PyObject *sums = room(to.len, run), *answer = NULL;
    if (sums != NULL && (step < run || step % run))
        PyErr_Format(PyExc_ValueError, "reads of %zd bytes are not whole runs of %zd", step, run);
    else if (sums != NULL) {
        char *out = PyBytes_AsString(sums);
        uint8_t *into = to.buf;
        Py_ssize_t done = 0, hashed = 0;
        int error = 0;
        Py_BEGIN_ALLOW_THREADS
        memset(out, 0, (size_t)(to.len / run * 8));
        while (done < to.len) {
            size_t want = (size_t)(to.len - done < step ? to.len - done : step);
            ssize_t got = pread(fd, into + done, want, (off_t)(offset + done));
            if (got < 0 && errno == EINTR)
                continue;
            error = got < 0 ? errno : 0;
            done += got > 0 ? got : 0;
            for (; hashed + run <= done; hashed += run, out += 8) {
                uint64_t sum = xxh3(into + hashed, (size_t)run);
                memcpy(out, &sum, 8);
            }
            if (got < (ssize_t)want)
                break;
        }
        Py_END_ALLOW_THREADS
        if (error) {
            errno = error;
            PyErr_SetFromErrno(PyExc_OSError);
        } else
            answer = Py_BuildValue("nO", done, sums);
    }
    Py_XDECREF(sums);
    PyBuffer_Release(&to);
    return answer;
}

static double now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

/* Sends or receives `size` bytes; returns their number, fewer if the peer closed the connection, -1 with errno. The
 * socket's timeout bounds a call, `until` all of them: both are EAGAIN. */
static ssize_t whole(int fd, uint8_t *at, size_t size, int sending, double until)
{
    size_t done = 0;
    while (done < size) {
        ssize_t got = sending ? send(fd, at + done, size - done, MSG_NOSIGNAL) : recv(fd, at + done, size - done, MSG_WAITALL);
        if (got < 0 && errno != EINTR)
            return -1;
        if (got == 0)
            break;
        done += got > 0 ? (size_t)got : 0;
        if (done < size && now() > until) {
            errno = EAGAIN;
            return -1;
        }
    }
    return (ssize_t)done;
}

/* Step by step: hashes and sends, or receives and hashes, so the second operation finds the bytes in the processor's cache. */
static PyObject *over_socket(PyObject *args, int sending)
{
    int fd;
    Py_buffer data;
    Py_ssize_t run, step;
    double until;
    if (!PyArg_ParseTuple(args, sending ? "iy*nnd" : "iw*nnd", &fd, &data, &run, &step, &until))
        return NULL;
    PyObject *sums = room(data.len, run), *answer = NULL;
    if (sums != NULL && (step < run || step % run))
        PyErr_Format(PyExc_ValueError, "pieces of %zd bytes are not whole runs of %zd", step, run);
    else if (sums != NULL) {
        char *out = PyBytes_AsString(sums);
        uint8_t *at = data.buf;
        Py_ssize_t done = 0;
        int error = 0;
        Py_BEGIN_ALLOW_THREADS
        memset(out, 0, (size_t)(data.len / run * 8));
        while (done < data.len) {
            Py_ssize_t want = data.len - done < step ? data.len - done : step;
            if (sending)
                sum_runs(at + done, (size_t)want, (size_t)run, out + done / run * 8);
            ssize_t got = whole(fd, at + done, (size_t)want, sending, until);
            error = got < 0 ? errno : 0;
            if (got < want)
                break;
            if (!sending)
                sum_runs(at + done, (size_t)want, (size_t)run, out + done / run * 8);
            done += want;
        }
        Py_END_ALLOW_THREADS
        if (error) {
            errno = error;
            PyErr_SetFromErrno(PyExc_OSError);
        } else if (done < data.len)
            PyErr_SetString(PyExc_ConnectionError, "the other side closed the connection");
        else {
            answer = sums;
            Py_INCREF(answer);
        }
    }
    Py_XDECREF(sums);
    PyBuffer_Release(&data);
    return answer;
}

static PyObject *send_runs(PyObject *self, PyObject *args)
{
    return over_socket(args, 1);
}

static PyObject *receive_runs(PyObject *self, PyObject *args)
{
    return over_socket(args, 0);
}

static PyMethodDef methods[] = {
    {"send", send_runs, METH_VARARGS, "send(fd, data, run_bytes, step, until) -> u64 of every run; until: monotonic seconds"},
    {"receive", receive_runs, METH_VARARGS, "receive(fd, into, run_bytes, step, until) -> u64 of every run"},
    {"read", read_runs, METH_VARARGS, "read(fd, to, offset, run_bytes, step) -> (bytes that came, u64 of every run)"},
    {"checksum", checksum, METH_VARARGS, "checksum(data) -> u64 of all bytes"},
    {"checksums", checksums, METH_VARARGS, "checksums(data, run_bytes) -> u64 of every run"},
    {"copy", copy, METH_VARARGS, "copy(to, source, run_bytes, arrived) -> u64 of every run, of `to` if arrived"},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
#ifdef WIDE
    if (__builtin_cpu_supports("avx512f"))
        add = add_all_wide;
#endif
    return PyModuleDef_Init(&module);
}
