/* The loops of the core that Python is too slow for: counting holds and keeps of pages, checking token
 * ids and hashing a chain of names. Each has a twin in plain Python (counts.py, names.py) that it equals in
 * every result; without a compiler the package installs without this file. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* -- counts: int32 holds, int32 keeps, int32 page ids (0 is no page) ------------------------- */

typedef struct {
    Py_buffer held, kept, ids, out;
    int32_t *h, *k, *p, *o;
    Py_ssize_t n, pages;
} Counts;

static int get(PyObject *object, Py_buffer *view, Py_ssize_t itemsize, int writable, const char *what)
{
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0)) < 0)
        return -1;
    if (view->itemsize != itemsize) {
        PyErr_Format(PyExc_TypeError, "%s has items of %zd bytes, not %zd", what, view->itemsize, itemsize);
        PyBuffer_Release(view);
        return -1;
    }
    if ((uintptr_t)view->buf % (uintptr_t)itemsize) {
        PyErr_Format(PyExc_ValueError, "%s is not aligned to items of %zd bytes; copy it", what, itemsize);
        PyBuffer_Release(view);
        return -1;
    }
    return 0;
}

/* The loops write while they read, so no argument may share memory with another. */
static int overlaps(const Py_buffer *a, const Py_buffer *b)
{
    const char *x = a->buf, *y = b->buf;
    return x < y + b->len && y < x + a->len;
}

static void let_go(Counts *c, int with_out)
{
    PyBuffer_Release(&c->held);
    PyBuffer_Release(&c->kept);
    PyBuffer_Release(&c->ids);
    if (with_out)
        PyBuffer_Release(&c->out);
}

static int open_counts(PyObject *args, Counts *c, int with_out)
{
    PyObject *held, *kept, *ids, *out = NULL;
    if (!PyArg_ParseTuple(args, with_out ? "OOOO" : "OOO", &held, &kept, &ids, &out))
        return -1;
    if (get(held, &c->held, 4, 1, "held") < 0)
        return -1;
    if (get(kept, &c->kept, 4, 1, "kept") < 0) {
        PyBuffer_Release(&c->held);
        return -1;
    }
    if (get(ids, &c->ids, 4, 0, "ids") < 0) {
        PyBuffer_Release(&c->held);
        PyBuffer_Release(&c->kept);
        return -1;
    }
    if (with_out && get(out, &c->out, 4, 1, "out") < 0) {
        let_go(c, 0);
        return -1;
    }
    c->h = c->held.buf;
    c->k = c->kept.buf;
    c->p = c->ids.buf;
    c->o = with_out ? c->out.buf : NULL;
    c->n = c->ids.len / 4;
    c->pages = c->held.len / 4;
    if (c->kept.len / 4 != c->pages || (with_out && c->out.len / 4 < c->pages)) {
        PyErr_SetString(PyExc_ValueError, "held, kept and out do not fit together");
        let_go(c, with_out);
        return -1;
    }
    if (overlaps(&c->held, &c->kept) || overlaps(&c->held, &c->ids) || overlaps(&c->kept, &c->ids) ||
        (with_out && (overlaps(&c->out, &c->held) || overlaps(&c->out, &c->kept) || overlaps(&c->out, &c->ids)))) {
        PyErr_SetString(PyExc_ValueError, "two arguments share memory");
        let_go(c, with_out);
        return -1;
    }
    for (Py_ssize_t i = 0; i < c->n; i++)
        if (c->p[i] < 0 || c->p[i] >= c->pages) {
            PyErr_Format(PyExc_IndexError, "page %d is not one of %zd", (int)c->p[i], c->pages);
            let_go(c, with_out);
            return -1;
        }
    return 0;
}

static PyObject *refuse(Counts *c, int with_out, int32_t page, const char *why)
{
    let_go(c, with_out);
    return PyErr_Format(PyExc_ValueError, why, (int)page);
}

static PyObject *lend(PyObject *self, PyObject *args)
{
    Counts c;
    if (open_counts(args, &c, 0) < 0)
        return NULL;
    for (Py_ssize_t i = 0; i < c.n; i++) {
        int32_t page = c.p[i];
        if (page && (c.h[page] != 0 || c.k[page] != 0)) {
            while (--i >= 0)
                if (c.p[i])
                    c.h[c.p[i]] = 0;
            return refuse(&c, 0, page, "page %d is not free and cannot be allocated");
        }
        if (page)
            c.h[page] = 1;
    }
    let_go(&c, 0);
    Py_RETURN_NONE;
}

static PyObject *retain(PyObject *self, PyObject *args)
{
    Counts c;
    Py_ssize_t fresh = 0;
    if (open_counts(args, &c, 0) < 0)
        return NULL;
    for (Py_ssize_t i = 0; i < c.n; i++) {
        int32_t page = c.p[i];
        if (page && c.h[page] == 0 && c.k[page] == 0)
            return refuse(&c, 0, page, "page %d is free; only a cached page or a page in use can be retained");
        if (page && c.h[page] > INT32_MAX - c.n)
            return refuse(&c, 0, page, "page %d is retained too often");
    }
    for (Py_ssize_t i = 0; i < c.n; i++)
        if (c.p[i] && c.h[c.p[i]]++ == 0)
            fresh++;
    let_go(&c, 0);
    return PyLong_FromSsize_t(fresh);
}

static PyObject *release(PyObject *self, PyObject *args)
{
    Counts c;
    Py_ssize_t idle = 0, freed = 0;
    if (open_counts(args, &c, 1) < 0)
        return NULL;
    for (Py_ssize_t i = 0; i < c.n; i++)
        if (c.p[i] && c.h[c.p[i]] < 1) {
            int32_t page = c.p[i];
            while (--i >= 0)
                if (c.p[i])
                    c.h[c.p[i]]++;
            return refuse(&c, 1, page, "page %d is released more often than it was retained");
        } else if (c.p[i])
            c.h[c.p[i]]--;
    for (Py_ssize_t i = 0; i < c.n; i++) {
        int32_t page = c.p[i];
        if (page && c.h[page] == 0) {
            c.h[page] = -1; /* seen: a page listed twice counts once */
            idle++;
            if (c.k[page] == 0)
                c.o[freed++] = page;
        }
    }
    for (Py_ssize_t i = 0; i < c.n; i++)
        if (c.p[i] && c.h[c.p[i]] < 0)
            c.h[c.p[i]] = 0;
    let_go(&c, 1);
    return Py_BuildValue("nn", idle, freed);
}

static PyObject *keep(PyObject *self, PyObject *args)
{
    Counts c;
    if (open_counts(args, &c, 0) < 0)
        return NULL;
    for (Py_ssize_t i = 0; i < c.n; i++) {
        int32_t page = c.p[i];
        if (page && c.h[page] == 0 && c.k[page] == 0)
            return refuse(&c, 0, page, "page %d is free and cannot be counted as cached");
        if (page && c.k[page] > INT32_MAX - c.n)
            return refuse(&c, 0, page, "page %d is cached too often");
    }
    for (Py_ssize_t i = 0; i < c.n; i++)
        if (c.p[i])
            c.k[c.p[i]]++;
    let_go(&c, 0);
    Py_RETURN_NONE;
}

static PyObject *drop(PyObject *self, PyObject *args)
{
    Counts c;
    Py_ssize_t freed = 0;
    if (open_counts(args, &c, 1) < 0)
        return NULL;
    for (Py_ssize_t i = 0; i < c.n; i++)
        if (c.p[i] && c.k[c.p[i]] < 1) {
            int32_t page = c.p[i];
            while (--i >= 0)
                if (c.p[i])
                    c.k[c.p[i]]++;
            return refuse(&c, 1, page, "page %d is dropped more often than it was cached");
        } else if (c.p[i])
            c.k[c.p[i]]--;
    for (Py_ssize_t i = 0; i < c.n; i++) {
        int32_t page = c.p[i];
        if (page && c.k[page] == 0 && c.h[page] == 0) {
            c.k[page] = -1;
            c.o[freed++] = page;
        }
    }
    for (Py_ssize_t i = 0; i < freed; i++)
        c.k[c.o[i]] = 0;
    let_go(&c, 1);
    return PyLong_FromSsize_t(freed);
}

/* -- names: BLAKE2b (RFC 7693) with a digest of 16 bytes over parent (16) and grain (64) ------- */

static const uint64_t IV[8] = {
    0x6a09e667f3bcc908u, 0xbb67ae8584caa73bu, 0x3c6ef372fe94f82bu, 0xa54ff53a5f1d36f1u,
    0x510e527fade682d1u, 0x9b05688c2b3e6c1fu, 0x1f83d9abfb41bd6bu, 0x5be0cd19137e2179u};

static uint64_t load64(const uint8_t *b)
{
    uint64_t w;
    memcpy(&w, b, 8);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    w = __builtin_bswap64(w);
#endif
    return w;
}

static uint64_t turn(uint64_t w, int n) { return w >> n | w << (64 - n); }

#define MIX(a, b, c, d, x, y) \
    a += b + m[x]; \
    d = turn(d ^ a, 32); \
    c += d; \
    b = turn(b ^ c, 24); \
    a += b + m[y]; \
    d = turn(d ^ a, 16); \
    c += d; \
    b = turn(b ^ c, 63);

/* The order of the words is known when this is compiled: all of the state stays in registers. */
#define ROUND(i0, i1, i2, i3, i4, i5, i6, i7, i8, i9, ia, ib, ic, id, ie, if_) \
    MIX(v0, v4, v8, vc, i0, i1) \
    MIX(v1, v5, v9, vd, i2, i3) \
    MIX(v2, v6, va, ve, i4, i5) \
    MIX(v3, v7, vb, vf, i6, i7) \
    MIX(v0, v5, va, vf, i8, i9) \
    MIX(v1, v6, vb, vc, ia, ib) \
    MIX(v2, v7, v8, vd, ic, id) \
    MIX(v3, v4, v9, ve, ie, if_)

/* One message of 80 bytes fits one block, so a link of the chain is one compression. */
static void link_name(uint8_t name[16], const uint8_t grain[64])
{
    uint64_t m[16];
    m[0] = load64(name);
    m[1] = load64(name + 8);
    for (int i = 0; i < 8; i++)
        m[i + 2] = load64(grain + 8 * i);
    m[10] = m[11] = m[12] = m[13] = m[14] = m[15] = 0;
    uint64_t first = IV[0] ^ 0x01010000u ^ 16u;
    uint64_t v0 = first, v1 = IV[1], v2 = IV[2], v3 = IV[3], v4 = IV[4], v5 = IV[5], v6 = IV[6], v7 = IV[7];
    uint64_t v8 = IV[0], v9 = IV[1], va = IV[2], vb = IV[3], vc = IV[4] ^ 80, vd = IV[5], ve = ~IV[6], vf = IV[7];
    ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
    ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3)
    ROUND(11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4)
    ROUND(7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8)
    ROUND(9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13)
    ROUND(2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9)
    ROUND(12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11)
    ROUND(13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10)
    ROUND(6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5)
    ROUND(10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0)
    ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
    ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3)
    uint64_t out[2] = {first ^ v0 ^ v8, IV[1] ^ v1 ^ v9};
    for (int i = 0; i < 16; i++)
        name[i] = (uint8_t)(out[i / 8] >> 8 * (i % 8));
}

static PyObject *chain(PyObject *self, PyObject *args)
{
    const char *parent, *data;
    Py_ssize_t parent_size, size;
    uint8_t name[16];
    if (!PyArg_ParseTuple(args, "y#y#", &parent, &parent_size, &data, &size))
        return NULL;
    if (parent_size != 16)
        return PyErr_Format(PyExc_ValueError, "a name has 16 bytes, not %zd", parent_size);
    memcpy(name, parent, 16);
    PyObject *names = PyList_New(size / 64);
    for (Py_ssize_t i = 0; names != NULL && i < size / 64; i++) {
        link_name(name, (const uint8_t *)data + 64 * i);
        PyObject *bytes = PyBytes_FromStringAndSize((const char *)name, 16);
        if (bytes == NULL || PyList_SetItem(names, i, bytes) < 0) {
            Py_DECREF(names);
            return NULL;
        }
    }
    return names;
}

static PyObject *any_negative(PyObject *self, PyObject *args)
{
    const char *data;
    Py_ssize_t size;
    uint32_t all = 0;
    if (!PyArg_ParseTuple(args, "y#", &data, &size))
        return NULL;
    for (Py_ssize_t i = 0; i < size / 4; i++) {
        uint32_t id;
        memcpy(&id, data + 4 * i, 4);
        all |= id;
    }
    return PyBool_FromLong(all >> 31);
}

/* -- ids: what a caller's list of Python's numbers holds ---------------------------------------- */

static PyObject *plain_ids(PyObject *self, PyObject *given)
{
    int is_list = PyList_CheckExact(given);
    if (!is_list && !PyTuple_CheckExact(given))
        Py_RETURN_NONE;
    Py_ssize_t size = is_list ? PyList_Size(given) : PyTuple_Size(given);
    PyObject *found = PyByteArray_FromStringAndSize(NULL, 4 * size);
    if (found == NULL)
        return NULL;
    char *out = PyByteArray_AsString(found);
    for (Py_ssize_t i = 0; i < size; i++) {
        PyObject *one = is_list ? PyList_GetItem(given, i) : PyTuple_GetItem(given, i);
        int beyond = 1;
        long long id = one != NULL && PyLong_CheckExact(one) ? PyLong_AsLongLongAndOverflow(one, &beyond) : -1;
        if (beyond || id < 0 || id > INT32_MAX) {
            PyErr_Clear();
            Py_DECREF(found);
            Py_RETURN_NONE;
        }
        int32_t value = (int32_t)id;
        memcpy(out + 4 * i, &value, 4);
    }
    return found;
}

/* What holds numbers alone is in no cycle: CPython finds that out for tuples by itself, when it has walked through them,
   and never for lists. */
static PyObject *unwatched(PyObject *self, PyObject *numbers)
{
    if (PyList_CheckExact(numbers) || PyTuple_CheckExact(numbers))
        PyObject_GC_UnTrack(numbers);
    Py_INCREF(numbers);
    return numbers;
}

/* Rows named before are marked in place while looking, and unmarked again. */
static PyObject *wrong_row(PyObject *self, PyObject *args)
{
    PyObject *rows, *open;
    Py_buffer r, o;
    if (!PyArg_ParseTuple(args, "OO", &rows, &open) || get(rows, &r, 8, 0, "rows") < 0)
        return NULL;
    if (get(open, &o, 1, 1, "open") < 0) {
        PyBuffer_Release(&r);
        return NULL;
    }
    if (overlaps(&r, &o)) {
        PyBuffer_Release(&r);
        PyBuffer_Release(&o);
        PyErr_SetString(PyExc_ValueError, "two arguments share memory");
        return NULL;
    }
    const int64_t *row = r.buf;
    uint8_t *flag = o.buf;
    Py_ssize_t n = r.len / 8, i = 0;
    for (; i < n && row[i] >= 0 && row[i] < o.len && flag[row[i]] == 1; i++)
        flag[row[i]] = 2;
    for (Py_ssize_t k = 0; k < i; k++)
        flag[row[k]] = 1;
    PyBuffer_Release(&r);
    PyBuffer_Release(&o);
    return PyLong_FromSsize_t(i < n ? i : -1);
}

/* -- masks: how long each bit stays set ---------------------------------------------------------- */

/* Counts of leading masks by bit, times `scale`. `known` is NULL, or a dict from which the masks of the keys in `items`
   are taken. */
static PyObject *counts_of(PyObject *known, PyObject *items, int places, int scale)
{
    PyObject *counts;
    if (!PyList_CheckExact(items) || places < 0 || places > 64) {
        PyErr_SetString(PyExc_ValueError, "the second last argument must be a list, and places 0 to 64");
        return NULL;
    }
    Py_ssize_t size = PyList_Size(items), count[64];
    uint64_t alive = places == 64 ? ~(uint64_t)0 : ((uint64_t)1 << places) - 1;
    for (int p = 0; p < places; p++)
        count[p] = size;
    for (Py_ssize_t i = 0; i < size && alive; i++) {
        PyObject *item = PyList_GetItem(items, i);
        if (item != NULL && known != NULL)
            item = PyDict_GetItemWithError(known, item);
        uint64_t mask = item == NULL ? 0 : PyLong_AsUnsignedLongLongMask(item);
        if ((item == NULL || mask == ~(uint64_t)0) && PyErr_Occurred())
            return NULL;
        for (uint64_t gone = alive & ~mask; gone; gone &= gone - 1)
            count[__builtin_ctzll(gone)] = i;
        alive &= mask;
    }
    if ((counts = PyList_New(places)) == NULL)
        return NULL;
    for (int p = 0; p < places; p++) {
        PyObject *one = PyLong_FromSsize_t(count[p] * scale);
        if (one == NULL || PyList_SetItem(counts, p, one) < 0) {
            Py_DECREF(counts);
            return NULL;
        }
    }
    return counts;
}

static PyObject *leading(PyObject *self, PyObject *args)
{
    PyObject *masks;
    int places;
    if (!PyArg_ParseTuple(args, "Oi", &masks, &places))
        return NULL;
    return counts_of(NULL, masks, places, 1);
}

static PyObject *leading_of(PyObject *self, PyObject *args)
{
    PyObject *known, *keys;
    int places, scale;
    if (!PyArg_ParseTuple(args, "O!Oii", &PyDict_Type, &known, &keys, &places, &scale))
        return NULL;
    return counts_of(known, keys, places, scale);
}

static PyMethodDef methods[] = {
    {"leading", leading, METH_VARARGS, "leading(masks, places) -> for each bit, the leading masks that have it"},
    {"leading_of", leading_of, METH_VARARGS,
     "leading_of(known, keys, places, scale) -> the same for the masks in the dict `known` (0 if none), times `scale`"},
    {"wrong_row", wrong_row, METH_VARARGS, "wrong_row(rows, open) -> place of the first bad row, or -1"},
    {"plain_ids", plain_ids, METH_O,
     "plain_ids(given) -> int32s of a list or tuple of plain ints from 0 on, or None for anything else"},
    {"unwatched", unwatched, METH_O, "unwatched(numbers) -> the same, which the collector walks through no more"},
    {"any_negative", any_negative, METH_VARARGS, "any_negative(data) -> whether an int32 in data is"},
    {"lend", lend, METH_VARARGS, "lend(held, kept, ids)"},
    {"retain", retain, METH_VARARGS, "retain(held, kept, ids) -> pages that nobody held before"},
    {"release", release, METH_VARARGS, "release(held, kept, ids, out) -> (idle pages, pages freed into out)"},
    {"keep", keep, METH_VARARGS, "keep(held, kept, ids)"},
    {"drop", drop, METH_VARARGS, "drop(held, kept, ids, out) -> pages freed into out"},
    {"chain", chain, METH_VARARGS, "chain(parent, data) -> the names of the whole grains"},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module); }
