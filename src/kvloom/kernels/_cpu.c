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

/* Tokens low to high - 1 of a page: their scores, and their values added up. */
static inline void score_page(const float *q, const float *page, Size s_place, Size low, Size high, Size dim, float scale, float *scores)
{
    Size at = low;
    for (; at + 4 <= high; at += 4) { /* four sums at once: one alone would wait for itself */
        const float *a = page + at * s_place, *b = a + s_place, *c = b + s_place, *d = c + s_place;
        float w = 0, x = 0, y = 0, z = 0;
#pragma omp simd reduction(+ : w, x, y, z)
        for (Size i = 0; i < dim; i++) {
            w += q[i] * a[i];
            x += q[i] * b[i];
            y += q[i] * c[i];
            z += q[i] * d[i];
        }
        scores[at - low] = w * scale;
        scores[at - low + 1] = x * scale;
        scores[at - low + 2] = y * scale;
        scores[at - low + 3] = z * scale;
    }
    for (; at < high; at++)
        scores[at - low] = dot(q, page + at * s_place, dim) * scale;
}

static inline void add_page(const float *weights, const float *page, Size s_place, Size low, Size high, Size dim, float *out)
{
    Size at = low;
    for (; at + 4 <= high; at += 4) {
        const float *a = page + at * s_place, *b = a + s_place, *c = b + s_place, *d = c + s_place;
        float w = weights[at - low], x = weights[at - low + 1], y = weights[at - low + 2], z = weights[at - low + 3];
#pragma omp simd
        for (Size i = 0; i < dim; i++)
            out[i] += w * a[i] + x * b[i] + y * c[i] + z * d[i];
    }
    for (; at < high; at++) {
        float weight = weights[at - low];
        const float *a = page + at * s_place;
#pragma omp simd
        for (Size i = 0; i < dim; i++)
            out[i] += weight * a[i];
    }
}

/* The `group` queries that share a head of K and V, over tokens first to length - 1 of one row. */
CLONES static void attend_head(const float *q, Size s_q, Head k, Head v, const int32_t *table, Size first, Size length,
                               Size block, Size group, Size dim, Size v_dim, float scale, float *scores, float *out)
{
    Size seen = length - first, begin = first / block, end = (length + block - 1) / block;
    for (Size b = begin; b < end; b++) {
        Size low = b == begin ? first - b * block : 0, high = b == end - 1 ? length - b * block : block;
        const float *page = k.data + table[b] * k.s_page;
        for (Size g = 0; g < group; g++)
            score_page(q + g * s_q, page, k.s_place, low, high, dim, scale, scores + g * seen + b * block + low - first);
    }
    for (Size g = 0; g < group; g++) {
        float *mine = scores + g * seen, most = mine[0], sum = 0;
#pragma omp simd reduction(max : most)
        for (Size at = 0; at < seen; at++)
            most = mine[at] > most ? mine[at] : most;
#pragma omp simd reduction(+ : sum)
        for (Size at = 0; at < seen; at++) {
            mine[at] = exp_of(mine[at] - most);
            sum += mine[at];
        }
        float inverse = 1.0f / sum;
#pragma omp simd
        for (Size at = 0; at < seen; at++)
            mine[at] *= inverse;
        memset(out + g * v_dim, 0, (size_t)v_dim * sizeof(float));
    }
    for (Size b = begin; b < end; b++) {
        Size low = b == begin ? first - b * block : 0, high = b == end - 1 ? length - b * block : block;
        const float *page = v.data + table[b] * v.s_page;
        for (Size g = 0; g < group; g++)
            add_page(scores + g * seen + b * block + low - first, page, v.s_place, low, high, v_dim, out + g * v_dim);
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
        attend_head((Floats)q + row * sq_row + head * group * sq_head, sq_head, keys, values,
                    (const int32_t *)tables + row * s_table, first[row], length[row], block, group, dim, v_dim, scale,
                    scores, (Floats)out + (row * heads + head * group) * v_dim);
    }
    Py_END_ALLOW_THREADS
    free(scores);
    Py_RETURN_NONE;
}

/* A layer's new tokens, one a row: q and k turned, k and v written behind what the row has, q attended. `joined` is q, k and v of
 * each row, head after head. */
static PyObject *step(PyObject *self, PyObject *args)
{
    Size joined, cosine, sine, out, begin, end, heads, k, v, kv, dim, block, tables, s_table, firsts, lengths, longest;
    Size sk_page, sk_place, sk_head, sv_page, sv_place, sv_head;
    float scale;
    if (!PyArg_ParseTuple(args, "nnnnnnnf(nnnnnnnnnnn)(nnnnn)", &joined, &cosine, &sine, &out, &begin, &end, &heads, &scale,
                          &k, &v, &kv, &dim, &block, &sk_page, &sk_place, &sk_head, &sv_page, &sv_place, &sv_head,
                          &tables, &s_table, &firsts, &lengths, &longest))
        return NULL;
    Size group = heads / kv, width = (heads + 2 * kv) * dim;
    Floats scores = malloc((size_t)(group * longest) * sizeof(float));
    if (scores == NULL)
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    turn_heads((Floats)joined + begin * width, (Floats)cosine + begin * dim, (Floats)sine + begin * dim, end - begin,
               heads + kv, dim / 2, width, dim);
    for (Size row = begin; row < end; row++) {
        const int32_t *table = (const int32_t *)tables + row * s_table;
        Size first = ((const int64_t *)firsts)[row], length = ((const int64_t *)lengths)[row], last = length - 1;
        const float *q = (Floats)joined + row * width, *new_k = q + heads * dim, *new_v = new_k + kv * dim;
        Floats to_k = (Floats)k + table[last / block] * sk_page + last % block * sk_place;
        Floats to_v = (Floats)v + table[last / block] * sv_page + last % block * sv_place;
        for (Size head = 0; head < kv; head++) {
            memcpy(to_k + head * sk_head, new_k + head * dim, (size_t)dim * sizeof(float));
            memcpy(to_v + head * sv_head, new_v + head * dim, (size_t)dim * sizeof(float));
        }
        for (Size head = 0; head < kv; head++) {
            Head keys = {(Floats)k + head * sk_head, sk_page, sk_place}, values = {(Floats)v + head * sv_head, sv_page, sv_place};
            attend_head(q + head * group * dim, dim, keys, values, table, first, length, block, group, dim, dim, scale,
                        scores, (Floats)out + (row * heads + head * group) * dim);
        }
    }
    Py_END_ALLOW_THREADS
    free(scores);
    Py_RETURN_NONE;
}

/* -- products of a few rows ------------------------------------------------------------------- */

typedef float Lanes __attribute__((vector_size(16)));
#define LANES 4
#define TILE 4   /* columns of a tile */
#define TALLEST 6 /* rows of a tile: the sums of 6 by 4 items stay in registers */

/* `rows` by `columns` items of out = x wᵀ, or added to out. The counts are constants, so that the sums stay in registers. The
 * columns of the next tile are fetched meanwhile: a column is too short for the processor to fetch it by itself. */
static inline __attribute__((always_inline)) void multiply_tile(const float *x, const float *w, float *out, Size dim, Size s_out,
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
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) {
            Lanes s = sums[r][c];
            float sum = (s[0] + s[2]) + (s[1] + s[3]);
            for (Size j = i; j < dim; j++)
                sum += x[r * dim + j] * w[c * dim + j];
            out[r * s_out + c] = add ? out[r * s_out + c] + sum : sum;
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
    const float *embeddings, *head, *norm, *cosine, *sine;
    const Layer *layers;
    Size count, vocabulary, hidden, inner, heads, kv, dim, block;
    float eps, one, scale;
    int tanh_form;
} Model;

/* Buffers for `rows` tokens. */
typedef struct {
    float *x, *normed, *joined, *attended, *both, *gated, *scores;
} Buffers;

/* One token of each sequence, with the embeddings in `buffers.x`: computes all layers, in place. */
static void run_layers(const Model *m, const Buffers *b, const Size *positions, Size rows)
{
    Size width = (m->heads + 2 * m->kv) * m->dim, group = m->heads / m->kv, dim = m->dim, hidden = m->hidden;
    for (const Layer *layer = m->layers; layer < m->layers + m->count; layer++) {
        norm_rows(b->x, (Floats)layer->norm, b->normed, rows, hidden, hidden, m->eps, m->one);
        multiply_rows(b->normed, (Floats)layer->qkv, b->joined, rows, 0, width, hidden, width, 0);
        for (Size row = 0; row < rows; row++) {
            Size at = positions[row], page = at / m->block, place = at % m->block;
            const int32_t *table = (const int32_t *)layer->tables + row * layer->s_table;
            float *q = b->joined + row * width, *k = q + m->heads * dim, *v = k + m->kv * dim;
            turn_heads(q, m->cosine + at * dim, m->sine + at * dim, 1, m->heads + m->kv, dim / 2, width, dim);
            for (Size head = 0; head < m->kv; head++) {
                Floats keys = (Floats)layer->k + head * layer->sk_head, values = (Floats)layer->v + head * layer->sv_head;
                memcpy(keys + table[page] * layer->sk_page + place * layer->sk_place, k + head * dim, (size_t)dim * sizeof(float));
                memcpy(values + table[page] * layer->sv_page + place * layer->sv_place, v + head * dim, (size_t)dim * sizeof(float));
                Head all_keys = {keys, layer->sk_page, layer->sk_place}, all_values = {values, layer->sv_page, layer->sv_place};
                attend_head(q + head * group * dim, dim, all_keys, all_values, table, 0, at + 1, m->block, group, dim, dim,
                            m->scale, b->scores, b->attended + (row * m->heads + head * group) * dim);
            }
        }
        multiply_rows(b->attended, (Floats)layer->output, b->x, rows, 0, hidden, m->heads * dim, hidden, 1);
        norm_rows(b->x, (Floats)layer->mlp_norm, b->normed, rows, hidden, hidden, m->eps, m->one);
        multiply_rows(b->normed, (Floats)layer->gate_up, b->both, rows, 0, 2 * m->inner, hidden, 2 * m->inner, 0);
        gate_rows(b->both, b->gated, rows, m->inner, m->tanh_form);
        multiply_rows(b->gated, (Floats)layer->down, b->x, rows, 0, hidden, m->inner, hidden, 1);
    }
}

static Size largest_of(const float *scores, Size count)
{
    Size best = 0;
    for (Size i = 1; i < count; i++)
        if (scores[i] > scores[best])
            best = i;
    return best;
}

/* Several tokens of each sequence, one after the other. Sequence r computes its given[r] known tokens, then the tokens that
 * it chooses itself, totals[r] in all. It chooses the most likely token after its last known token and after each later
 * token, wanted[r] in all. Sequences with the largest totals come first. chosen[step][r] is what it chose in a step, and
 * `logits` has the last ones of each sequence. */
static PyObject *generate(PyObject *self, PyObject *args)
{
    Size embeddings, head, norm, cosine, sine, layers, tokens, given, totals, wanted, starts, chosen, logits;
    Size rows, width, steps, longest;
    Model m;
    if (!PyArg_ParseTuple(args, "(nnnnnnnnnnnnnnfffp)(nnnnnnnnnnn)", &embeddings, &head, &norm, &cosine, &sine, &layers, &m.count,
                          &m.vocabulary, &m.hidden, &m.inner, &m.heads, &m.kv, &m.dim, &m.block, &m.eps, &m.one, &m.scale,
                          &m.tanh_form, &tokens, &given, &totals, &wanted, &starts, &chosen, &logits, &rows, &width, &steps,
                          &longest))
        return NULL;
    m.embeddings = (Floats)embeddings, m.head = (Floats)head, m.norm = (Floats)norm;
    m.cosine = (Floats)cosine, m.sine = (Floats)sine, m.layers = (const Layer *)layers;
    Size qkv = (m.heads + 2 * m.kv) * m.dim, all_heads = m.heads * m.dim;
    Size each = 2 * m.hidden + qkv + all_heads + 3 * m.inner;
    Floats memory = malloc((size_t)(rows * each + m.heads / m.kv * longest) * sizeof(float));
    Size *positions = malloc((size_t)rows * sizeof(Size));
    if (memory == NULL || positions == NULL) {
        free(memory);
        free(positions);
        return PyErr_NoMemory();
    }
    Py_BEGIN_ALLOW_THREADS
    Buffers b = {memory};
    b.normed = b.x + rows * m.hidden;
    b.joined = b.normed + rows * m.hidden;
    b.attended = b.joined + rows * qkv;
    b.both = b.attended + rows * all_heads;
    b.gated = b.both + rows * 2 * m.inner;
    b.scores = b.gated + rows * m.inner;
    const int64_t *known = (const int64_t *)given, *total = (const int64_t *)totals, *most = (const int64_t *)wanted;
    int64_t *found = (int64_t *)chosen;
    Size active = rows;
    for (Size step = 0; step < steps; step++) {
        while (active && total[active - 1] <= step)
            active--;
        int choosing = 0;
        for (Size row = 0; row < active; row++) {
            int64_t token = step < known[row] ? ((const int64_t *)tokens)[row * width + step] : found[(step - 1) * rows + row];
            memcpy(b.x + row * m.hidden, m.embeddings + token * m.hidden, (size_t)m.hidden * sizeof(float));
            positions[row] = ((const int64_t *)starts)[row] + step;
            Size after = step - (known[row] - 1);
            choosing |= after >= 0 && after < most[row];
        }
        run_layers(&m, &b, positions, active);
        if (!choosing)
            continue;
        norm_rows(b.x, m.norm, b.normed, active, m.hidden, m.hidden, m.eps, m.one);
        multiply_rows(b.normed, m.head, (Floats)logits, active, 0, m.vocabulary, m.hidden, m.vocabulary, 0);
        for (Size row = 0; row < active; row++)
            found[step * rows + row] = largest_of((Floats)logits + row * m.vocabulary, m.vocabulary);
    }
    Py_END_ALLOW_THREADS
    free(memory);
    free(positions);
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
    {"generate", generate, METH_VARARGS, "generate((the model), (the sequences))"},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_cpu", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__cpu(void) { return PyModuleDef_Init(&module); }
