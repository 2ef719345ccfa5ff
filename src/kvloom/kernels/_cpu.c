/* The small operations of a step on a CPU, in float32: norms, gates, rotations, writing to pages, and single queries
 * over them. Each has a twin in torch (fused/operations.py, write/reference.py, attention/reference.py) that it equals up to rounding; without a
 * compiler the package installs without this file. Addresses and strides (in items) come from cpu.py, which has checked
 * them: nothing is checked here. No function touches Python's objects while it computes, and none holds its lock. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* One build for every processor of its kind: the loops exist several times, and the loader chooses. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

typedef float *Floats;
typedef Py_ssize_t Size;

/* e to the x, within two units in the last place, for x up to 88: what is below -87 becomes about 0. A loop of it
 * is done several at a time, which a call of the library's is not. */
static inline float exp_of(float x)
{
    x = x < -87.0f ? -87.0f : x;
    float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f; /* the nearest integer */
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}

static inline float dot(const float *a, const float *b, Size n)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (Size i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

/* -- vectors ---------------------------------------------------------------------------------- */

#if defined(__x86_64__)
#define LANES 8
#else
#define LANES 4
#endif
typedef float Lanes __attribute__((vector_size(4 * LANES)));
#if defined(__clang__) || __GNUC__ >= 12
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t LaneIds __attribute__((vector_size(4 * LANES)));
#define PICK(a, b, ...) __builtin_shuffle(a, b, (LaneIds){__VA_ARGS__})
#endif
#define INLINE static inline __attribute__((always_inline))

INLINE void load(Lanes *to, const float *from) { memcpy(to, from, sizeof *to); }

/* sums[i] = the sum of the lanes of v[i], for four vectors at once. */
INLINE void add_lanes(const Lanes *v, float *sums)
{
#if LANES == 8
    Lanes low = PICK(v[0], v[1], 0, 8, 2, 10, 4, 12, 6, 14) + PICK(v[0], v[1], 1, 9, 3, 11, 5, 13, 7, 15);
    Lanes high = PICK(v[2], v[3], 0, 8, 2, 10, 4, 12, 6, 14) + PICK(v[2], v[3], 1, 9, 3, 11, 5, 13, 7, 15);
    Lanes all = PICK(low, high, 0, 1, 8, 9, 4, 5, 12, 13) + PICK(low, high, 2, 3, 10, 11, 6, 7, 14, 15);
    all += PICK(all, all, 4, 5, 6, 7, 0, 1, 2, 3);
#else
    Lanes low = PICK(v[0], v[1], 0, 4, 2, 6) + PICK(v[0], v[1], 1, 5, 3, 7);
    Lanes high = PICK(v[2], v[3], 0, 4, 2, 6) + PICK(v[2], v[3], 1, 5, 3, 7);
    Lanes all = PICK(low, high, 0, 1, 4, 5) + PICK(low, high, 2, 3, 6, 7);
#endif
    memcpy(sums, &all, 4 * sizeof *sums);
}

/* -- norms, gates, rotations ---------------------------------------------------------------- */

CLONES static void norm_rows(const float *x, const float *weight, float *out, Size rows, Size dim, Size s_row, float eps, float one)
{
    for (Size row = 0; row < rows; row++, x += s_row, out += dim) {
        float root = 1.0f / sqrtf(dot(x, x, dim) / (float)dim + eps);
#pragma omp simd
        for (Size i = 0; i < dim; i++)
            out[i] = x[i] * root * (one + weight[i]);
    }
}

static PyObject *rms_norm(PyObject *self, PyObject *args)
{
    Size x, weight, out, rows, dim, s_row;
    float eps, one;
    if (!PyArg_ParseTuple(args, "nnnnnnff", &x, &weight, &out, &rows, &dim, &s_row, &eps, &one))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    norm_rows((Floats)x, (Floats)weight, (Floats)out, rows, dim, s_row, eps, one);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

CLONES static void gate_rows(const float *x, float *out, Size rows, Size dim, int tanh_form)
{
    for (Size row = 0; row < rows; row++, x += 2 * dim, out += dim) {
        const float *up = x + dim;
        if (tanh_form) { /* 1 + tanh(y) = 2 / (1 + exp(-2y)) */
#pragma omp simd
            for (Size i = 0; i < dim; i++) {
                float y = 1.5957691216057308f * (x[i] + 0.044715f * x[i] * x[i] * x[i]);
                y = y < -87.0f ? -87.0f : y;
                out[i] = x[i] / (1.0f + exp_of(-y)) * up[i];
            }
        } else {
#pragma omp simd
            for (Size i = 0; i < dim; i++) {
                float y = x[i] < -87.0f ? -87.0f : x[i];
                out[i] = x[i] / (1.0f + exp_of(-y)) * up[i];
            }
        }
    }
}

static PyObject *gated(PyObject *self, PyObject *args)
{
    Size x, out, rows, dim;
    int tanh_form;
    if (!PyArg_ParseTuple(args, "nnnnp", &x, &out, &rows, &dim, &tanh_form))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    gate_rows((Floats)x, (Floats)out, rows, dim, tanh_form);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* In place: each pair of dims, half a head apart, is read before it is written. */
CLONES static void turn_heads(float *x, const float *cosine, const float *sine, Size tokens, Size heads, Size half, Size s_token, Size s_head)
{
    for (Size token = 0; token < tokens; token++, cosine += 2 * half, sine += 2 * half)
        for (Size head = 0; head < heads; head++) {
            float *low = x + token * s_token + head * s_head, *high = low + half;
#pragma omp simd
            for (Size i = 0; i < half; i++) {
                float a = low[i], b = high[i];
                low[i] = a * cosine[i] - b * sine[i];
                high[i] = b * cosine[half + i] + a * sine[half + i];
            }
        }
}

static PyObject *rotate(PyObject *self, PyObject *args)
{
    Size x, cosine, sine, tokens, heads, half, s_token, s_head;
    if (!PyArg_ParseTuple(args, "nnnnnnnn", &x, &cosine, &sine, &tokens, &heads, &half, &s_token, &s_head))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    turn_heads((Floats)x, (Floats)cosine, (Floats)sine, tokens, heads, half, s_token, s_head);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* -- pages ----------------------------------------------------------------------------------- */

static PyObject *put(PyObject *self, PyObject *args)
{
    Size target, source, page, place, tokens, heads, dim, s_page, s_place, s_head, s_token, s_from;
    if (!PyArg_ParseTuple(args, "nnnnnnnnnnnn", &target, &source, &page, &place, &tokens, &heads, &dim, &s_page,
                          &s_place, &s_head, &s_token, &s_from))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    const int64_t *pages = (const int64_t *)page, *places = (const int64_t *)place;
    for (Size token = 0; token < tokens; token++) {
        Floats at = (Floats)target + pages[token] * s_page + places[token] * s_place;
        const float *from = (Floats)source + token * s_token;
        for (Size head = 0; head < heads; head++)
            memcpy(at + head * s_head, from + head * s_from, (size_t)dim * sizeof(float));
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* One head of K and V of one layer, as its pages lie. */
typedef struct {
    const float *data;
    Size s_page, s_place;
} Head;

#define MOST_ROWS 8    /* rows of one sequence that read a page together */
#define MOST_QUERIES 4 /* that are computed together: the sums of more do not stay in registers */

/* Starts to load one head of `count` tokens into the cache. Pages lie far apart, so the processor does not fetch the next one
 * by itself. */
INLINE void fetch(const float *page, Size s_place, Size count, Size dim)
{
    for (Size at = 0; at < count; at++)
        for (Size i = 0; i < dim; i += 16) /* a cache line */
            __builtin_prefetch(page + at * s_place + i);
}

/* The scores of 1 to MOST_QUERIES queries with tokens low to high - 1 of a page. Query i is at q[i], its scores at scores + i * s_score.
 * Loads the same tokens of the page `next`, if there is one. */
INLINE void score_page(const float *const *q, const float *page, Size s_place, Size low, Size high, Size dim, float scale,
                       float *scores, Size s_score, const float *next, const int queries)
{
    Size at = low, whole = dim / LANES * LANES;
    for (; at + 4 <= high; at += 4) { /* four tokens at once: a sum alone would wait for itself */
        if (next != NULL)
            fetch(next + at * s_place, s_place, 4, dim);
        const float *from = page + at * s_place;
        Lanes sums[MOST_QUERIES][4] = {{{0}}}, keys[4], left;
        for (Size i = 0; i < whole; i += LANES) {
#pragma GCC unroll 4
            for (int t = 0; t < 4; t++)
                load(&keys[t], from + t * s_place + i);
#pragma GCC unroll 4
            for (int n = 0; n < queries; n++) {
                load(&left, q[n] + i);
#pragma GCC unroll 4
                for (int t = 0; t < 4; t++)
                    sums[n][t] += left * keys[t];
            }
        }
#pragma GCC unroll 4
        for (int n = 0; n < queries; n++) {
            float *to = scores + n * s_score + at - low;
            add_lanes(sums[n], to);
            for (int t = 0; t < 4; t++)
                to[t] *= scale;
            for (int t = 0; t < 4 && whole < dim; t++)
                to[t] += dot(q[n] + whole, from + t * s_place + whole, dim - whole) * scale;
        }
    }
    for (; at < high; at++)
        for (int n = 0; n < queries; n++)
            scores[n * s_score + at - low] = dot(q[n], page + at * s_place, dim) * scale;
}

/* Adds dims i to i + vectors * LANES - 1 of the values of some tokens, times the weights of 1 to MOST_QUERIES queries, to their outputs.
 * Loads the same values of the page `next`, if there is one. */
INLINE void add_dims(const float *weights, Size s_weight, const float *page, Size s_place, Size tokens, float *const *out, Size i,
                     const float *next, const int queries, const int vectors)
{
    Lanes sums[MOST_QUERIES][4], value;
#pragma GCC unroll 4
    for (int n = 0; n < queries; n++)
        memcpy(sums[n], out[n] + i, (size_t)vectors * sizeof value);
    for (Size at = 0; at < tokens; at++) {
        if (next != NULL)
            fetch(next + at * s_place + i, s_place, 1, vectors * LANES);
#pragma GCC unroll 4
        for (int part = 0; part < vectors; part++) {
            load(&value, page + at * s_place + i + part * LANES);
#pragma GCC unroll 4
            for (int n = 0; n < queries; n++)
                sums[n][part] += weights[n * s_weight + at] * value;
        }
    }
#pragma GCC unroll 4
    for (int n = 0; n < queries; n++)
        memcpy(out[n] + i, sums[n], (size_t)vectors * sizeof value);
}

/* Adds the values of some tokens of a page, times the weights of 1 to MOST_QUERIES queries, to their outputs. */
INLINE void add_page(const float *weights, Size s_weight, const float *page, Size s_place, Size tokens, Size dim, float *const *out,
                     const float *next, const int queries)
{
    Size i = 0;
    for (; i + 4 * LANES <= dim; i += 4 * LANES)
        add_dims(weights, s_weight, page, s_place, tokens, out, i, next, queries, 4);
    for (; i + LANES <= dim; i += LANES)
        add_dims(weights, s_weight, page, s_place, tokens, out, i, next, queries, 1);
    for (; i < dim; i++)
        for (int n = 0; n < queries; n++)
            for (Size at = 0; at < tokens; at++)
                out[n][i] += weights[n * s_weight + at] * page[at * s_place + i];
}

/* The weights of a query from its scores. Only items begin to end - 1 count, the others get the weight 0. */
INLINE void weigh(float *scores, Size begin, Size end, Size count)
{
    float most = scores[begin], sum = 0;
#pragma omp simd reduction(max : most)
    for (Size at = begin; at < end; at++)
        most = scores[at] > most ? scores[at] : most;
#pragma omp simd reduction(+ : sum)
    for (Size at = begin; at < end; at++) {
        scores[at] = exp_of(scores[at] - most);
        sum += scores[at];
    }
    float inverse = 1.0f / sum;
#pragma omp simd
    for (Size at = begin; at < end; at++)
        scores[at] *= inverse;
    for (Size at = 0; at < begin; at++)
        scores[at] = 0;
    for (Size at = end; at < count; at++)
        scores[at] = 0;
}

/* The queries of a few rows of one sequence that share a head of K and V: `group` in each row, at q + row * s_row + i * s_q. Row r
 * is attended over tokens firsts[r] to lengths[r] - 1. Each page is read once, for all rows. `scores` has room for the tokens
 * that any row sees, for every query. */
CLONES static void attend_rows(const float *q, Size s_row, Size s_q, Size rows, Head k, Head v, const int32_t *table, const int64_t *firsts,
                               const int64_t *lengths, Size block, Size group, Size dim, Size v_dim, float scale, float *scores,
                               float *out, Size s_out)
{
    Size first = firsts[0], length = lengths[0], queries = rows * group;
    for (Size r = 1; r < rows; r++) {
        first = firsts[r] < first ? firsts[r] : first;
        length = lengths[r] > length ? lengths[r] : length;
    }
    Size seen = length - first, begin = first / block, end = (length + block - 1) / block;
    const float *asked[queries]; /* where each query is, and its output */
    float *answers[queries];
    for (Size n = 0; n < queries; n++) {
        asked[n] = q + n / group * s_row + n % group * s_q;
        answers[n] = out + n / group * s_out + n % group * v_dim;
    }
    for (Size b = begin; b < end; b++) {
        Size low = b == begin ? first - b * block : 0, high = b == end - 1 ? length - b * block : block, n = 0;
        const float *page = k.data + table[b] * k.s_page, *next = b + 1 < end ? k.data + table[b + 1] * k.s_page : NULL;
        float *to = scores + b * block + low - first;
        for (; n + 4 <= queries; n += 4, next = NULL)
            score_page(asked + n, page, k.s_place, low, high, dim, scale, to + n * seen, seen, next, 4);
        for (; n + 2 <= queries; n += 2, next = NULL)
            score_page(asked + n, page, k.s_place, low, high, dim, scale, to + n * seen, seen, next, 2);
        if (n < queries)
            score_page(asked + n, page, k.s_place, low, high, dim, scale, to + n * seen, seen, next, 1);
    }
    for (Size r = 0; r < rows; r++) {
        for (Size g = 0; g < group; g++)
            weigh(scores + (r * group + g) * seen, firsts[r] - first, lengths[r] - first, seen);
        memset(out + r * s_out, 0, (size_t)(group * v_dim) * sizeof(float));
    }
    for (Size b = begin; b < end; b++) {
        Size low = b == begin ? first - b * block : 0, high = b == end - 1 ? length - b * block : block, n = 0;
        const float *page = v.data + table[b] * v.s_page + low * v.s_place;
        const float *next = b + 1 < end ? v.data + table[b + 1] * v.s_page : NULL;
        const float *weights = scores + b * block + low - first;
        for (; n + 4 <= queries; n += 4, next = NULL)
            add_page(weights + n * seen, seen, page, v.s_place, high - low, v_dim, answers + n, next, 4);
        for (; n + 2 <= queries; n += 2, next = NULL)
            add_page(weights + n * seen, seen, page, v.s_place, high - low, v_dim, answers + n, next, 2);
        if (n < queries)
            add_page(weights + n * seen, seen, page, v.s_place, high - low, v_dim, answers + n, next, 1);
    }
}

static PyObject *decode(PyObject *self, PyObject *args)
{
    Size q, k, v, tables, firsts, lengths, out, begin, end, heads, kv, dim, v_dim, block;
    Size sq_row, sq_head, sk_page, sk_place, sk_head, sv_page, sv_place, sv_head, s_table, longest;
    float scale;
    if (!PyArg_ParseTuple(args, "nnnnnnnnnnnnnn(nn)(nnn)(nnn)nnf", &q, &k, &v, &tables, &firsts, &lengths, &out, &begin,
                          &end, &heads, &kv, &dim, &v_dim, &block, &sq_row, &sq_head, &sk_page, &sk_place, &sk_head,
                          &sv_page, &sv_place, &sv_head, &s_table, &longest, &scale))
        return NULL;
    Size group = heads / kv;
    Floats scores = malloc((size_t)(group * longest) * sizeof(float));
    if (scores == NULL)
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    const int64_t *first = (const int64_t *)firsts, *length = (const int64_t *)lengths;
    for (Size unit = begin; unit < end; unit++) {
        Size row = unit / kv, head = unit % kv;
        Head keys = {(Floats)k + head * sk_head, sk_page, sk_place}, values = {(Floats)v + head * sv_head, sv_page, sv_place};
        attend_rows((Floats)q + row * sq_row + head * group * sq_head, sq_row, sq_head, 1, keys, values,
                    (const int32_t *)tables + row * s_table, first + row, length + row, block, group, dim, v_dim, scale,
                    scores, (Floats)out + (row * heads + head * group) * v_dim, heads * v_dim);
    }
    Py_END_ALLOW_THREADS
    free(scores);
    Py_RETURN_NONE;
}

/* How many rows from `row` on, at most MOST_ROWS, belong to the same sequence. Row r belongs to sequence lines[r]. */
static inline Size rows_together(const int64_t *lines, Size row, Size end)
{
    Size most = row + MOST_ROWS < end ? row + MOST_ROWS : end, after = row + 1;
    while (after < most && lines[after] == lines[row])
        after++;
    return after - row;
}

/* A layer's new tokens, one a row: q and k turned, k and v written behind what the sequence has, q attended. `joined` is q, k and
 * v of each row, head after head. The rows of a sequence follow one another. */
static PyObject *step(PyObject *self, PyObject *args)
{
    Size joined, cosine, sine, out, begin, end, heads, k, v, kv, dim, block, tables, s_table, lines, firsts, lengths, longest;
    Size sk_page, sk_place, sk_head, sv_page, sv_place, sv_head;
    float scale;
    if (!PyArg_ParseTuple(args, "nnnnnnnf(nnnnnnnnnnn)(nnnnnn)", &joined, &cosine, &sine, &out, &begin, &end, &heads, &scale,
                          &k, &v, &kv, &dim, &block, &sk_page, &sk_place, &sk_head, &sv_page, &sv_place, &sv_head,
                          &tables, &s_table, &lines, &firsts, &lengths, &longest))
        return NULL;
    Size group = heads / kv, width = (heads + 2 * kv) * dim;
    Floats scores = malloc((size_t)(MOST_ROWS * group * (longest + MOST_ROWS)) * sizeof(float)); /* windows of rows overlap */
    if (scores == NULL)
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    turn_heads((Floats)joined + begin * width, (Floats)cosine + begin * dim, (Floats)sine + begin * dim, end - begin,
               heads + kv, dim / 2, width, dim);
    const int64_t *line = (const int64_t *)lines, *first = (const int64_t *)firsts, *length = (const int64_t *)lengths;
    for (Size row = begin, count; row < end; row += count) {
        const int32_t *table = (const int32_t *)tables + line[row] * s_table;
        const float *q = (Floats)joined + row * width;
        count = rows_together(line, row, end);
        for (Size one = 0; one < count; one++) {
            Size last = length[row + one] - 1, page = table[last / block], place = last % block;
            const float *new_k = q + one * width + heads * dim, *new_v = new_k + kv * dim;
            for (Size head = 0; head < kv; head++) {
                memcpy((Floats)k + page * sk_page + place * sk_place + head * sk_head, new_k + head * dim, (size_t)dim * sizeof(float));
                memcpy((Floats)v + page * sv_page + place * sv_place + head * sv_head, new_v + head * dim, (size_t)dim * sizeof(float));
            }
        }
        for (Size head = 0; head < kv; head++) {
            Head keys = {(Floats)k + head * sk_head, sk_page, sk_place}, values = {(Floats)v + head * sv_head, sv_page, sv_place};
            attend_rows(q + head * group * dim, width, dim, count, keys, values, table, first + row, length + row, block,
                        group, dim, dim, scale, scores, (Floats)out + (row * heads + head * group) * dim, heads * dim);
        }
    }
    Py_END_ALLOW_THREADS
    free(scores);
    Py_RETURN_NONE;
}

/* -- products of a few rows ------------------------------------------------------------------- */

#define TILE 4    /* columns of a tile */
#define TALLEST 6 /* rows of a tile: the sums of 6 by 4 items stay in registers */

/* `rows` by `columns` items of out = x wᵀ, or added to out. The counts are constants, so that the sums stay in registers. The
 * columns of the next tile are fetched meanwhile: a column is too short for the processor to fetch it by itself. */
INLINE void multiply_tile(const float *x, const float *w, float *out, Size dim, Size s_out,
                          const int rows, const int columns, int add)
{
    Lanes sums[TALLEST][TILE] = {{{0}}};
    const float *lefts[TALLEST], *rights[TILE]; /* the compiler keeps them in registers */
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
        lefts[r] = x + r * dim;
#pragma GCC unroll 4
    for (int c = 0; c < columns; c++)
        rights[c] = w + c * dim;
    Size i = 0, ahead = columns * dim;
    for (; i + 2 * LANES <= dim; i += 2 * LANES) {
        Lanes left, more, right[TILE], beyond[TILE];
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) {
            __builtin_prefetch(rights[c] + ahead);
            memcpy(&right[c], rights[c], sizeof left);
            memcpy(&beyond[c], rights[c] + LANES, sizeof left);
            rights[c] += 2 * LANES;
        }
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            memcpy(&left, lefts[r], sizeof left);
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++)
                sums[r][c] += left * right[c];
        }
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            memcpy(&more, lefts[r] + LANES, sizeof left);
            lefts[r] += 2 * LANES;
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++)
                sums[r][c] += more * beyond[c];
        }
    }
    for (int r = 0; r < rows; r++) {
        float row[TILE];
        add_lanes(sums[r], row);
        for (int c = 0; c < columns; c++) {
            float sum = row[c];
            for (Size j = i; j < dim; j++)
                sum += x[r * dim + j] * w[c * dim + j];
            out[r * s_out + c] = add ? out[r * s_out + c] + sum : sum;
        }
    }
}

/* Columns [begin, end) of out = x wᵀ. BLAS copies w for a product of two rows, which takes longer than the product. */
CLONES static void multiply_rows(const float *x, const float *w, float *out, Size rows, Size begin, Size end, Size dim, Size s_out, int add)
{
    for (Size c = begin; c < end; c += TILE) {
        const float *columns = w + c * dim;
        for (Size r = 0, tall; r < rows; r += tall) {
            const float *left = x + r * dim;
            float *to = out + r * s_out + c;
            Size more = rows - r;
            tall = more <= TALLEST ? more : more < TALLEST + 3 ? 4 : TALLEST; /* a tile of one row takes as long as one of two */
            if (end - c < TILE) {
                for (Size one = 0; one < end - c; one++)
                    for (Size row = 0; row < tall; row++)
                        multiply_tile(left + row * dim, columns + one * dim, to + row * s_out + one, dim, s_out, 1, 1, add);
            } else if (tall == 6)
                multiply_tile(left, columns, to, dim, s_out, 6, 4, add);
            else if (tall == 5)
                multiply_tile(left, columns, to, dim, s_out, 5, 4, add);
            else if (tall == 4)
                multiply_tile(left, columns, to, dim, s_out, 4, 4, add);
            else if (tall == 3)
                multiply_tile(left, columns, to, dim, s_out, 3, 4, add);
            else if (tall == 2)
                multiply_tile(left, columns, to, dim, s_out, 2, 4, add);
            else
                multiply_tile(left, columns, to, dim, s_out, 1, 4, add);
        }
    }
}

static PyObject *multiply(PyObject *self, PyObject *args)
{
    Size x, w, out, rows, begin, end, dim, s_out;
    int add;
    if (!PyArg_ParseTuple(args, "nnnnnnnnp", &x, &w, &out, &rows, &begin, &end, &dim, &s_out, &add))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    multiply_rows((Floats)x, (Floats)w, (Floats)out, rows, begin, end, dim, s_out, add);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* -- small models ----------------------------------------------------------------------------- */

/* One decoder layer: addresses of its weights, and of its K and V pages with their strides. `tables` has one line of page
 * ids per sequence. */
typedef struct {
    int64_t norm, qkv, output, mlp_norm, gate_up, down, k, v;
    int64_t sk_page, sk_place, sk_head, sv_page, sv_place, sv_head, tables, s_table;
} Layer;

typedef struct {
    Size embeddings, head, norm, cosine, sine, layers; /* addresses */
    Size count, vocabulary, hidden, inner, heads, kv, dim, block;
    float eps, one, scale;
    int tanh_form;
} Model;

/* Buffers for `rows` tokens. Each token has its sequence, and the range of tokens that it sees: from 0 to its own position. */
typedef struct {
    float *x, *normed, *joined, *attended, *both, *gated, *scores;
    int64_t *tokens, *lines, *firsts, *lengths;
    void *memory;
} Buffers;

/* Returns 0 if there is no memory. Sequences have up to `longest` tokens. */
static int get_buffers(Buffers *b, const Model *m, Size rows, Size longest)
{
    Size width = (m->heads + 2 * m->kv) * m->dim, all_heads = m->heads * m->dim;
    Size each = 2 * m->hidden + width + all_heads + 3 * m->inner, scores = MOST_ROWS * (m->heads / m->kv) * longest;
    b->memory = malloc((size_t)rows * 4 * sizeof(int64_t) + (size_t)(rows * each + scores) * sizeof(float));
    b->tokens = b->memory;
    b->lines = b->tokens + rows;
    b->firsts = b->lines + rows;
    b->lengths = b->firsts + rows;
    b->x = (Floats)(b->lengths + rows);
    b->normed = b->x + rows * m->hidden;
    b->joined = b->normed + rows * m->hidden;
    b->attended = b->joined + rows * width;
    b->both = b->attended + rows * all_heads;
    b->gated = b->both + rows * 2 * m->inner;
    b->scores = b->gated + rows * m->inner;
    if (b->memory != NULL)
        memset(b->firsts, 0, (size_t)rows * sizeof(int64_t));
    return b->memory != NULL;
}

/* Turns, writes and attends the q, k and v of all rows in `b->joined`. */
static void attend_layer(const Model *m, const Layer *layer, const Buffers *b, Size rows)
{
    Size width = (m->heads + 2 * m->kv) * m->dim, group = m->heads / m->kv, dim = m->dim;
    for (Size row = 0; row < rows; row++) {
        Size at = b->lengths[row] - 1, page = ((const int32_t *)layer->tables)[b->lines[row] * layer->s_table + at / m->block];
        float *q = b->joined + row * width, *k = q + m->heads * dim, *v = k + m->kv * dim;
        turn_heads(q, (Floats)m->cosine + at * dim, (Floats)m->sine + at * dim, 1, m->heads + m->kv, dim / 2, width, dim);
        Floats to_k = (Floats)layer->k + page * layer->sk_page + at % m->block * layer->sk_place;
        Floats to_v = (Floats)layer->v + page * layer->sv_page + at % m->block * layer->sv_place;
        for (Size head = 0; head < m->kv; head++) {
            memcpy(to_k + head * layer->sk_head, k + head * dim, (size_t)dim * sizeof(float));
            memcpy(to_v + head * layer->sv_head, v + head * dim, (size_t)dim * sizeof(float));
        }
    }
    for (Size row = 0, count; row < rows; row += count) {
        const int32_t *table = (const int32_t *)layer->tables + b->lines[row] * layer->s_table;
        count = rows_together(b->lines, row, rows);
        for (Size head = 0; head < m->kv; head++) {
            Head keys = {(Floats)layer->k + head * layer->sk_head, layer->sk_page, layer->sk_place};
            Head values = {(Floats)layer->v + head * layer->sv_head, layer->sv_page, layer->sv_place};
            attend_rows(b->joined + row * width + head * group * dim, width, dim, count, keys, values, table, b->firsts + row,
                        b->lengths + row, m->block, group, dim, dim, m->scale, b->scores,
                        b->attended + (row * m->heads + head * group) * dim, m->heads * dim);
        }
    }
}

/* Computes all layers for the tokens of `b`. The rows of a sequence follow one another, in the order of their positions. */
static void run_layers(const Model *m, const Buffers *b, Size rows)
{
    Size width = (m->heads + 2 * m->kv) * m->dim, hidden = m->hidden;
    for (Size row = 0; row < rows; row++)
        memcpy(b->x + row * hidden, (Floats)m->embeddings + b->tokens[row] * hidden, (size_t)hidden * sizeof(float));
    for (const Layer *layer = (const Layer *)m->layers, *end = layer + m->count; layer < end; layer++) {
        norm_rows(b->x, (Floats)layer->norm, b->normed, rows, hidden, hidden, m->eps, m->one);
        multiply_rows(b->normed, (Floats)layer->qkv, b->joined, rows, 0, width, hidden, width, 0);
        attend_layer(m, layer, b, rows);
        multiply_rows(b->attended, (Floats)layer->output, b->x, rows, 0, hidden, m->heads * m->dim, hidden, 1);
        norm_rows(b->x, (Floats)layer->mlp_norm, b->normed, rows, hidden, hidden, m->eps, m->one);
        multiply_rows(b->normed, (Floats)layer->gate_up, b->both, rows, 0, 2 * m->inner, hidden, 2 * m->inner, 0);
        gate_rows(b->both, b->gated, rows, m->inner, m->tanh_form);
        multiply_rows(b->gated, (Floats)layer->down, b->x, rows, 0, hidden, m->inner, hidden, 1);
    }
}

/* The logits after the rows places[0] to places[count - 1]. */
static void logits_after(const Model *m, const Buffers *b, const int64_t *places, Size count, float *logits)
{
    for (Size i = 0; i < count; i++)
        norm_rows(b->x + places[i] * m->hidden, (Floats)m->norm, b->normed + i * m->hidden, 1, m->hidden, m->hidden, m->eps, m->one);
    multiply_rows(b->normed, (Floats)m->head, logits, count, 0, m->vocabulary, m->hidden, m->vocabulary, 0);
}

static Size largest_of(const float *scores, Size count)
{
    Size best = 0;
    for (Size i = 1; i < count; i++)
        if (scores[i] > scores[best])
            best = i;
    return best;
}

#define MODEL "(nnnnnnnnnnnnnnfffp)"
#define MODEL_FIELDS(m)                                                                                                              \
    &(m).embeddings, &(m).head, &(m).norm, &(m).cosine, &(m).sine, &(m).layers, &(m).count, &(m).vocabulary, &(m).hidden,              \
        &(m).inner, &(m).heads, &(m).kv, &(m).dim, &(m).block, &(m).eps, &(m).one, &(m).scale, &(m).tanh_form

/* Several known tokens of each sequence at once. Row r has a token of sequence lines[r], which then has lengths[r] tokens. The
 * logits are those after the rows `places`. */
static PyObject *compute(PyObject *self, PyObject *args)
{
    Size tokens, lines, lengths, rows, places, wanted, logits, longest;
    Model m;
    Buffers b;
    if (!PyArg_ParseTuple(args, MODEL "(nnnnnnnn)", MODEL_FIELDS(m), &tokens, &lines, &lengths, &rows, &places, &wanted, &logits, &longest))
        return NULL;
    if (!get_buffers(&b, &m, rows, longest))
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    memcpy(b.tokens, (void *)tokens, (size_t)rows * sizeof(int64_t));
    memcpy(b.lines, (void *)lines, (size_t)rows * sizeof(int64_t));
    memcpy(b.lengths, (void *)lengths, (size_t)rows * sizeof(int64_t));
    run_layers(&m, &b, rows);
    logits_after(&m, &b, (const int64_t *)places, wanted, (Floats)logits);
    Py_END_ALLOW_THREADS
    free(b.memory);
    Py_RETURN_NONE;
}

/* The same, and then the tokens that each sequence chooses itself, one after the other. Sequence i has its last known token in
 * row places[i]. It chooses the most likely token after this token and after each later one, wanted[i] in all, and computes
 * later[i] of them. Sequences with the largest `later` come first. chosen[step][i] is what sequence i chooses in a step. */
static PyObject *generate(PyObject *self, PyObject *args)
{
    Size tokens, lines, lengths, known, places, sequences, wanted, later, chosen, steps, longest;
    Model m;
    Buffers b;
    if (!PyArg_ParseTuple(args, MODEL "(nnnnnnnnnnn)", MODEL_FIELDS(m), &tokens, &lines, &lengths, &known, &places, &sequences,
                          &wanted, &later, &chosen, &steps, &longest))
        return NULL;
    if (!get_buffers(&b, &m, known, longest))
        return PyErr_NoMemory();
    Floats logits = malloc((size_t)(sequences * m.vocabulary) * sizeof(float));
    int64_t *ends = malloc((size_t)(2 * sequences) * sizeof(int64_t)), *every = ends + sequences;
    if (logits == NULL || ends == NULL) {
        free(b.memory);
        free(logits);
        free(ends);
        return PyErr_NoMemory();
    }
    Py_BEGIN_ALLOW_THREADS
    memcpy(b.tokens, (void *)tokens, (size_t)known * sizeof(int64_t));
    memcpy(b.lines, (void *)lines, (size_t)known * sizeof(int64_t));
    memcpy(b.lengths, (void *)lengths, (size_t)known * sizeof(int64_t));
    run_layers(&m, &b, known);
    for (Size i = 0; i < sequences; i++) {
        every[i] = i;
        ends[i] = b.lengths[((const int64_t *)places)[i]];
    }
    const int64_t *most = (const int64_t *)wanted, *until = (const int64_t *)later, *after = (const int64_t *)places;
    int64_t *found = (int64_t *)chosen;
    Size active = sequences;
    for (Size step = 0; step < steps; step++, after = every) {
        Size choosing = 0; /* sequences from here on choose nothing */
        if (step) {
            while (active && until[active - 1] < step)
                active--;
            for (Size i = 0; i < active; i++) {
                b.tokens[i] = found[(step - 1) * sequences + i];
                b.lines[i] = i;
                b.lengths[i] = ends[i] + step;
            }
            run_layers(&m, &b, active);
        }
        for (Size i = 0; i < active; i++)
            choosing = most[i] > step ? i + 1 : choosing;
        if (!choosing)
            continue;
        logits_after(&m, &b, after, choosing, logits);
        for (Size i = 0; i < choosing; i++)
            found[step * sequences + i] = largest_of(logits + i * m.vocabulary, m.vocabulary);
    }
    Py_END_ALLOW_THREADS
    free(b.memory);
    free(logits);
    free(ends);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"rms_norm", rms_norm, METH_VARARGS, "rms_norm(x, weight, out, rows, dim, row stride, eps, one)"},
    {"gated", gated, METH_VARARGS, "gated(x, out, rows, dim, tanh)"},
    {"rotate", rotate, METH_VARARGS, "rotate(x, cos, sin, tokens, heads, half, token stride, head stride), in place"},
    {"put", put, METH_VARARGS, "put(pages, new, page, place, tokens, heads, dim, three strides of pages, two of new)"},
    {"decode", decode, METH_VARARGS, "decode(q, k, v, tables, firsts, lengths, out, begin, end, shape, strides, scale)"},
    {"step", step, METH_VARARGS, "step(joined, cos, sin, out, begin, end, heads, scale, (the layer's pages), (the step's rows))"},
    {"multiply", multiply, METH_VARARGS, "multiply(x, w, out, rows, begin, end, dim, row stride of out, add)"},
    {"compute", compute, METH_VARARGS, "compute((the model), (the tokens, and whose logits))"},
    {"generate", generate, METH_VARARGS, "generate((the model), (the tokens, and how many to choose))"},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_cpu", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__cpu(void) { return PyModuleDef_Init(&module); }
