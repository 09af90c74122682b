/* Operations of a decoder on a CPU, in float32; trainer_backend/models/cpu_kernels.py has the formulas. Tensors of
   tokens may have any stride between tokens; each token's numbers are contiguous. Do not build with
   -ffinite-math-only: a NaN of broken weights must reach the log-probs, where the engine detects it. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 128 /* keys whose scores are in memory at a time */
#define WIDEST 256 /* the largest head dimension */
#define INLINE static inline __attribute__((always_inline))
typedef int64_t whole;

#if defined(__AVX512F__)
#define LANES 16
#define TOGETHER 8 /* queries computed at a time: their sums fill the registers */
#define ROWS 3 /* rows of a product computed at a time: their sums fill the registers too */
#elif defined(__AVX__)
#define LANES 8
#define TOGETHER 4
#define ROWS 1
#else
#define LANES 4
#define TOGETHER 4
#define ROWS 1
#endif
#define TWO (ROWS > 2 ? 2 : ROWS)
typedef float lanes __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t places __attribute__((vector_size(LANES * 4)));

/* exp(x) with a relative error of 1e-7: 2^n times a polynomial of the remainder (Cephes, expf). */
INLINE float power_of_e(float x) {
    float low = x < -87.0f ? -87.0f : x;
    low = low > 88.0f ? 88.0f : low;
    float n = floorf(low * 1.44269504088896341f + 0.5f);
    float r = low - n * 0.693359375f + n * 2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    union { int32_t i; float f; } two = {((int32_t)n + 127) << 23};
    y *= two.f;
    return x < -87.0f ? 0.0f : y;
}

INLINE float dot(const float *a, const float *b, whole size) {
    float sum = 0.0f;
    for (whole d = 0; d < size; d++) sum += a[d] * b[d];
    return sum;
}

/* Products read a weight in its own layout, [outputs, inputs]. The sums of ROWS tokens by COLUMNS outputs fill the
   registers; each sum is a vector of lanes. The lanes of every sum are then added in the same order, so that a result
   does not depend on the tokens and outputs that are computed together with it. */
#define COLUMNS 8
typedef float columns __attribute__((vector_size(COLUMNS * 4), aligned(4), may_alias));
#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (places){__VA_ARGS__})
#endif
#define OWN(s, i) ((i) / s % 2 ? LANES + (i) : (i))
#define OTHER(s, i) ((i) / s % 2 ? LANES + (i) - s : (i) + s)
#define EIGHT(f, s, i) \
    f(s, i), f(s, i + 1), f(s, i + 2), f(s, i + 3), f(s, i + 4), f(s, i + 5), f(s, i + 6), f(s, i + 7)
#if LANES == 16
#define ALL(f, s) EIGHT(f, s, 0), EIGHT(f, s, 8)
#else
#define ALL(f, s) EIGHT(f, s, 0)
#endif
/* Lanes that are s apart are added, in a and in b; the result interleaves both. */
#define FOLDED(a, b, s) (PICK(a, b, ALL(OWN, s)) + PICK(a, b, ALL(OTHER, s)))

INLINE columns sum_lanes(const lanes *v) {
#if LANES >= COLUMNS
    lanes a = FOLDED(v[0], v[4], 4), b = FOLDED(v[1], v[5], 4), c = FOLDED(v[2], v[6], 4), d = FOLDED(v[3], v[7], 4);
    a = FOLDED(a, c, 2), b = FOLDED(b, d, 2);
    union { lanes all; columns part[LANES / COLUMNS]; } both = {FOLDED(a, b, 1)};
    columns sums = both.part[0];
    if (LANES > COLUMNS) sums += both.part[LANES / COLUMNS - 1];
    return sums;
#else
    columns sums;
    for (int i = 0; i < COLUMNS; i++) sums[i] = v[i][0] + v[i][1] + (v[i][2] + v[i][3]);
    return sums;
#endif
}

/* Write the [rows, COLUMNS] products to `out`, or add them if `adds`. `inputs` is a multiple of LANES. Meanwhile
   `lines` rows of weights from `ahead` on are prefetched: with few tokens, memory bounds the speed of a product. */
INLINE void dots(const float *x, whole x_stride, const float *w, whole w_stride, whole inputs, float *out,
                 whole out_stride, int rows, const float *ahead, int lines, int adds) {
    lanes sums[ROWS][COLUMNS] = {0};
    for (whole k = 0; k < inputs; k += LANES) {
        lanes of_x[ROWS];
        for (int n = 0; n < lines; n++) {
            if (lines > 1) __builtin_prefetch(ahead + n * w_stride + k, 0, 3); /* L1: few tokens leave room there */
            else __builtin_prefetch(ahead + n * w_stride + k, 0, 2);
        }
        for (int i = 0; i < rows; i++) of_x[i] = *(const lanes *)(x + i * x_stride + k);
        for (int n = 0; n < COLUMNS; n++) {
            lanes of_w = *(const lanes *)(w + n * w_stride + k);
            for (int i = 0; i < rows; i++) sums[i][n] += of_x[i] * of_w;
        }
    }
    for (int i = 0; i < rows; i++) {
        columns *to = (columns *)(out + i * out_stride), sum = sum_lanes(sums[i]);
        if (adds) sum += *to;
        *to = sum;
    }
}

struct product {
    const float *x, *w;
    whole x_stride, tokens, outputs, inputs, out_stride;
    float *out;
    int adds;
};

#define SPAN 768 /* inputs at a time: this part of COLUMNS rows of a weight fits in a core's nearest cache */
#define TILE(rows, lines) dots(x, of->x_stride, w, of->inputs, span, out, of->out_stride, rows, ahead, lines, adds)
#define TILES(rows)                   \
    switch (lines) {                  \
        case 0: TILE(rows, 0); break; \
        case 1: TILE(rows, 1); break; \
        case 2: TILE(rows, 2); break; \
        case 4: TILE(rows, 4); break; \
        default: TILE(rows, 8);       \
    }

/* Compute the COLUMNS outputs from `first` on for all tokens. */
static void multiply_columns(const struct product *of, whole first) {
    whole groups = (of->tokens + ROWS - 1) / ROWS, spans = (of->inputs + SPAN - 1) / SPAN, span;
    whole size = (of->inputs / LANES + spans - 1) / spans * LANES;
    int most = groups >= 8 ? 1 : groups >= 4 ? 2 : groups >= 2 ? 4 : 8;
    for (whole k = 0; k < of->inputs; k += size) {
        const float *w = of->w + first * of->inputs + k, *next = w + size;
        span = of->inputs - k < size ? of->inputs - k : size;
        int adds = of->adds || k, missing = COLUMNS;
        if (k + size >= of->inputs) {
            next = w - k + COLUMNS * of->inputs;
            missing = first + 2 * COLUMNS <= of->outputs ? COLUMNS : 0;
        }
        for (whole t = 0; t < of->tokens; t += ROWS) {
            const float *x = of->x + t * of->x_stride + k, *ahead = next + (COLUMNS - missing) * of->inputs;
            float *out = of->out + t * of->out_stride + first;
            int lines = missing ? most : 0;
            missing -= lines;
            if (of->tokens - t >= ROWS) TILES(ROWS)
            else if (ROWS == 3 && of->tokens - t == 2) TILES(TWO)
            else TILES(1)
        }
    }
}

/* Outputs that fill no COLUMNS are computed with others, a second time. So `adds` needs a multiple of COLUMNS. */
void product(const float *x, whole x_stride, const float *w, whole tokens, whole outputs, whole inputs,
             float *out, whole out_stride, int adds, int threads) {
    struct product of = {x, w, x_stride, tokens, outputs, inputs, out_stride, out, adds};
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (whole first = 0; first <= outputs - COLUMNS; first += COLUMNS) multiply_columns(&of, first);
    if (outputs % COLUMNS) multiply_columns(&of, outputs - COLUMNS);
}

whole vector_lanes(void) { return LANES; }

/* Gradients of weights are summed over TOKENS tokens here; torch adds these partial sums. */
#define TOKENS 64

INLINE void norm_row(const float *x, const float *weight, float eps, whole width, float *out) {
    float inverse = 1.0f / sqrtf(dot(x, x, width) / (float)width + eps);
    for (whole d = 0; d < width; d++) out[d] = x[d] * inverse * weight[d];
}

/* Write the norm of `x` to `out`. If `added` is given, write x + added to `sums`, and the norm of that to `out`. */
void rms_norm(const float *x, const float *added, const float *weight, float eps, whole tokens, whole width,
              float *sums, float *out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (whole t = 0; t < tokens; t++) {
        const float *from = x + t * width;
        float *sum = sums + t * width;
        if (added) {
            for (whole d = 0; d < width; d++) sum[d] = from[d] + added[t * width + d];
            from = sum;
        }
        norm_row(from, weight, eps, width, out + t * width);
    }
}

/* With r = 1 / (root mean square of x), x^ = r * x and g = dy: write the gradient by the input,
   r * (g * weight - x^ * mean(g * weight * x^)), to `by_x`, which may be g. Add that by the weight, g * x^. */
INLINE void norm_back(const float *x, const float *weight, const float *g, float eps, whole width, float *by_x,
                      float *by_weight) {
    float mean = 0.0f, inverse = 1.0f / sqrtf(dot(x, x, width) / (float)width + eps);
    for (whole d = 0; d < width; d++) mean += g[d] * weight[d] * x[d];
    mean *= inverse * inverse / (float)width;
    for (whole d = 0; d < width; d++) {
        float slope = g[d];
        by_weight[d] += slope * x[d] * inverse;
        by_x[d] = inverse * (slope * weight[d] - x[d] * mean);
    }
}

void rms_norm_backward(const float *x, const float *weight, const float *g, const float *by_sums, float eps,
                       whole tokens, whole width, float *by_x, float *by_weight, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (whole first = 0; first < tokens; first += TOKENS)
        for (whole t = first; t < tokens && t < first + TOKENS; t++) {
            whole at = t * width;
            norm_back(x + at, weight, g + at, eps, width, by_x + at, by_weight + first / TOKENS * width);
            for (whole d = 0; by_sums && d < width; d++) by_x[at + d] += by_sums[at + d];
        }
}

/* Rotate the halves of a head. Of the sine the second half is read: a table may have the first one negated. */
INLINE void turn(const float *x, const float *cos, const float *sin, float sign, whole half, float *out) {
    for (whole d = 0; d < half; d++) {
        float first = x[d], second = x[d + half], s = sign * sin[d + half];
        out[d] = first * cos[d] - second * s;
        out[d + half] = second * cos[d + half] + first * s;
    }
}

INLINE void norm_and_turn(const float *x, const float *weight, float eps, const float *cos, const float *sin,
                          whole size, float *out) {
    float normed[WIDEST], inverse = weight ? 1.0f / sqrtf(dot(x, x, size) / (float)size + eps) : 1.0f;
    for (whole d = 0; d < size; d++) normed[d] = weight ? x[d] * inverse * weight[d] : x[d];
    turn(normed, cos, sin, 1.0f, size / 2, out);
}

/* If `position` is null, token t has row t of the tables. */
void rotary(const float *x, whole stride, whole tokens, whole heads, whole queries, whole size,
            const float *by_query, const float *by_key, float eps, const float *cos, const float *sin,
            const whole *position, float *out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (whole t = 0; t < tokens; t++)
        for (whole h = 0; h < heads; h++) {
            float *to = out + (t * heads + h) * size;
            const float *from = x + t * stride + h * size, *weight = h < queries ? by_query : by_key;
            whole row = (position ? position[t] : t) * size;
            if (size == 32) norm_and_turn(from, weight, eps, cos + row, sin + row, 32, to);
            else if (size == 64) norm_and_turn(from, weight, eps, cos + row, sin + row, 64, to);
            else norm_and_turn(from, weight, eps, cos + row, sin + row, size, to);
        }
}

INLINE void turn_back(const float *x, const float *weight, float eps, const float *cos, const float *sin,
                      const float *g, whole size, float *by_x, float *by_weight) {
    float turned[WIDEST];
    turn(g, cos, sin, -1.0f, size / 2, weight ? turned : by_x);
    if (weight) norm_back(x, weight, turned, eps, size, by_x, by_weight);
}

/* `x` is read only if there is a weight. */
void rotary_backward(const float *x, whole stride, whole tokens, whole heads, whole size, const float *weight,
                     float eps, const float *cos, const float *sin, const float *g, float *by_x,
                     whole by_stride, float *by_weight, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (whole first = 0; first < tokens; first += TOKENS)
        for (whole t = first; t < tokens && t < first + TOKENS; t++)
            for (whole h = 0; h < heads; h++) {
                const float *from = x + t * stride + h * size, *grad = g + (t * heads + h) * size;
                const float *c = cos + t * size, *s = sin + t * size;
                float *to = by_x + t * by_stride + h * size, *sums = by_weight + first / TOKENS * size;
                if (size == 32) turn_back(from, weight, eps, c, s, grad, 32, to, sums);
                else if (size == 64) turn_back(from, weight, eps, c, s, grad, 64, to, sums);
                else turn_back(from, weight, eps, c, s, grad, size, to, sums);
            }
}

/* Write silu(x) * y to `out`, which may be x. */
INLINE void gated_row(const float *x, const float *y, whole width, float *out) {
    for (whole d = 0; d < width; d++) out[d] = x[d] / (1.0f + power_of_e(-x[d])) * y[d];
}

void swiglu(const float *gate, whole gate_stride, const float *up, whole up_stride, whole tokens, whole width,
            float *out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (whole t = 0; t < tokens; t++)
        gated_row(gate + t * gate_stride, up + t * up_stride, width, out + t * width);
}

/* Write for each token the gradient by gate, then the gradient by up. */
void swiglu_backward(const float *gate, whole gate_stride, const float *up, whole up_stride, const float *g,
                     whole tokens, whole width, float *by_both, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (whole t = 0; t < tokens; t++) {
        const float *x = gate + t * gate_stride, *y = up + t * up_stride, *slope = g + t * width;
        float *by_x = by_both + 2 * t * width, *by_y = by_x + width;
        for (whole d = 0; d < width; d++) {
            float share = 1.0f / (1.0f + power_of_e(-x[d]));
            by_x[d] = slope[d] * y[d] * share * (1.0f + x[d] * (1.0f - share));
            by_y[d] = slope[d] * x[d] * share;
        }
    }
}

/* Copy keys and values of tokens to a cache [slots * heads, room, size]; the rooms of keys and values may differ. */
void store(const float *k, whole k_stride, const float *v, whole v_stride, whole tokens, whole heads,
           whole size, whole key_room, whole value_room, const whole *head, const whole *column, float *keys,
           float *values) {
    for (whole t = 0; t < tokens; t++)
        for (whole h = 0; h < heads; h++) {
            whole row = head[t * heads + h], c = column[t];
            memcpy(keys + (row * key_room + c) * size, k + t * k_stride + h * size, size * sizeof(float));
            memcpy(values + (row * value_room + c) * size, v + t * v_stride + h * size, size * sizeof(float));
        }
}

/* Write the [queries, some] products of queries with keys. If `some` is no multiple of COLUMNS, the last COLUMNS
   overlap with those before. Meanwhile the values of these keys are prefetched. */
INLINE void scores(const float *query, int queries, const float *keys, const float *values, whole some,
                   whole size, float *out) {
    if (size % LANES || some < COLUMNS) {
        for (int i = 0; i < queries; i++)
            for (whole j = 0; j < some; j++) out[i * BLOCK + j] = dot(query + i * size, keys + j * size, size);
        return;
    }
    for (whole first = 0; first < some; first += COLUMNS) {
        whole j = first + COLUMNS <= some ? first : some - COLUMNS;
        const float *ahead = values + j * size;
        dots(query, size, keys + j * size, size, size, out + j, BLOCK, queries, ahead, COLUMNS, 0);
    }
}

/* Replace each score of a block by exp(score - highest), with the highest score so far; return that score. */
INLINE float softened(float *score, whole some, float highest, float *sum) {
    float most[LANES], added = 0.0f;
    for (int n = 0; n < LANES; n++) most[n] = highest;
    for (whole j = some; j % LANES; j++) score[j] = -INFINITY;
    for (whole j = 0; j < some; j += LANES)
        for (int n = 0; n < LANES; n++) most[n] = score[j + n] > most[n] ? score[j + n] : most[n];
    for (int n = 0; n < LANES; n++) highest = most[n] > highest ? most[n] : highest;
    for (whole j = 0; j < some; j++) score[j] = power_of_e(score[j] - highest);
    for (whole j = 0; j < some; j++) added += score[j];
    *sum = added;
    return highest;
}

/* Add the weighted values to `mixed` [queries, size], `wide` vectors at a time. Prefetch keys from `next` on. */
INLINE whole mixed_by(const float *share, int queries, const float *values, whole some, whole size, whole d,
                      int wide, const float *next, float *mixed) {
    for (; d + wide * LANES <= size; d += wide * LANES) {
        lanes sums[ROWS][4];
        for (int i = 0; i < queries; i++)
            for (int n = 0; n < wide; n++) sums[i][n] = *(lanes *)(mixed + i * size + d + n * LANES);
        for (whole j = 0; j < some; j++) {
            lanes weight[ROWS];
            for (int i = 0; i < queries; i++) weight[i] = share[i * BLOCK + j] - (lanes){0};
            for (int n = 0; n < wide; n++) {
                lanes of_v = *(const lanes *)(values + j * size + d + n * LANES);
                __builtin_prefetch(next + j * size + d + n * LANES, 0, 2);
                for (int i = 0; i < queries; i++) sums[i][n] += weight[i] * of_v;
            }
        }
        for (int i = 0; i < queries; i++)
            for (int n = 0; n < wide; n++) *(lanes *)(mixed + i * size + d + n * LANES) = sums[i][n];
    }
    return d;
}

INLINE void mix(const float *share, int queries, const float *values, whole some, whole size, const float *next,
                float *mixed) {
    whole d = mixed_by(share, queries, values, some, size, 0, 4, next, mixed);
    d = mixed_by(share, queries, values, some, size, d, 1, next, mixed);
    for (whole j = 0; d < size && j < some; j++)
        for (int i = 0; i < queries; i++)
            for (whole e = d; e < size; e++) mixed[i * size + e] += share[i * BLOCK + j] * values[j * size + e];
}

/* Attend with adjacent queries to `count` keys, in blocks with an online softmax. `next`: the keys to prefetch. */
INLINE void attend_some(const float *q, int queries, const float *keys, const float *values, const float *next,
                        whole count, float scale, whole size, float *out, float *lse) {
    float highest[ROWS], sum[ROWS], mixed[ROWS * WIDEST], share[ROWS * BLOCK], query[ROWS * WIDEST];
    for (whole d = 0; d < queries * size; d++) mixed[d] = 0.0f, query[d] = q[d] * scale;
    for (int i = 0; i < queries; i++) highest[i] = -INFINITY, sum[i] = 0.0f;
    for (whole first = 0; first < count; first += BLOCK, keys += BLOCK * size, values += BLOCK * size) {
        whole some = count - first < BLOCK ? count - first : BLOCK;
        scores(query, queries, keys, values, some, size, share);
        for (int i = 0; i < queries; i++) {
            float added, most = softened(share + i * BLOCK, some, highest[i], &added);
            float kept = power_of_e(highest[i] - most);
            for (whole d = 0; d < size; d++) mixed[i * size + d] *= kept;
            highest[i] = most, sum[i] = sum[i] * kept + added;
        }
        mix(share, queries, values, some, size, some < BLOCK ? next : keys + BLOCK * size, mixed);
    }
    for (int i = 0; i < queries; i++) {
        for (whole d = 0; d < size; d++) out[i * size + d] = mixed[i * size + d] / sum[i];
        lse[i] = highest[i] + logf(sum[i]);
    }
}

/* Attend with all queries of one key-value head, up to ROWS at a time. */
INLINE void attend_head(const float *q, whole times, const float *keys, const float *values, const float *next,
                        whole count, float scale, whole size, float *out, float *lse) {
    whole h = 0;
    for (; h + ROWS <= times; h += ROWS)
        attend_some(q + h * size, ROWS, keys, values, next, count, scale, size, out + h * size, lse + h);
    if (ROWS == 3 && h + 2 == times)
        attend_some(q + h * size, TWO, keys, values, next, count, scale, size, out + h * size, lse + h);
    else if (h < times)
        attend_some(q + h * size, 1, keys, values, next, count, scale, size, out + h * size, lse + h);
}

/* Each token attends to the keys of its row up to its own column. */
void attend(const float *q, whole stride, const float *keys, const float *values, whole tokens, whole heads,
            whole kv_heads, whole size, whole key_room, whole value_room, const whole *head, const whole *column,
            float scale, float *out, float *lse, int threads) {
    whole times = heads / kv_heads;
#pragma omp parallel for schedule(dynamic, 8) num_threads(threads) if (threads > 1)
    for (whole t = 0; t < tokens; t++)
        for (whole h = 0; h < kv_heads; h++) {
            whole at = t * kv_heads + h, behind = at + 1 < tokens * kv_heads ? at + 1 : at;
            const float *k = keys + head[at] * key_room * size, *v = values + head[at] * value_room * size;
            const float *next = keys + head[behind] * key_room * size;
            attend_head(q + t * stride + h * times * size, times, k, v, next, column[t] + 1, scale, size,
                        out + at * times * size, lse + at * times);
        }
}

/* Attention over a row of tries in depth-first order. The positions (depths) define what a token sees: itself, and
   for each smaller depth the last token before it with that depth. So keys and values are kept by depth: a token at
   depth p sees those at depths 0 to p. Successive tokens' queries are computed together. Heads are padded to vectors. */

#define SETTLED 32 /* groups of queries after which sums of gradients move from float32 to float64 */

/* The tokens of a row and their heads: [L, heads, size] with a stride between tokens. `query` has the index of each
   token's query, -1 for none; null: token i has query i. */
struct row {
    const float *q, *k, *v;
    whole q_stride, k_stride, v_stride, tokens, heads, kv_heads, size, longest;
    const whole *position, *query;
    float scale;
};

/* Keys and values by depth: [size, room] for scores (and slopes), [room, size] for weighted sums. */
struct path {
    whole size, room;
    float *by_size_k, *by_size_v, *k, *v, *q, *grad, *scores, *slopes, *near;
    double *far;
    whole *owner, depth;
    void *memory;
};

static int open_path(struct path *path, const struct row *row, int backward) {
    whole size = (row->size + LANES - 1) / LANES * LANES;
    whole room = (row->longest + LANES - 1) / LANES | 1; /* odd: rows fall into different sets of the CPU's cache */
    path->size = size, path->room = room *= LANES, path->depth = 0;
    whole plane = size * room + 2 * LANES, group = TOGETHER * (size > room ? size : room) + 2 * LANES;
    whole floats = 4 * plane + 4 * group + (backward ? 2 * plane : 0);
    char *memory = calloc(1, floats * 4 + (backward ? 16 * plane + 8 * room : 0) + 64);
    if (!memory) return 0;
    float *at = (float *)(((uintptr_t)memory + 63) / 64 * 64);
    path->memory = memory;
    path->by_size_k = at, at += plane;
    path->by_size_v = at, at += plane;
    path->k = at, at += plane;
    path->v = at, at += plane;
    path->q = at, at += group;
    path->grad = at, at += group;
    path->scores = at, at += group;
    path->slopes = at, at += group;
    path->near = at, at += backward ? 2 * plane : 0;
    path->far = (double *)at, at += backward ? 4 * plane : 0;
    path->owner = (whole *)at;
    return 1;
}

INLINE void push(struct path *path, const struct row *row, whole token, whole head, int backward) {
    whole at = row->position[token], size = path->size, room = path->room;
    const float *k = row->k + token * row->k_stride + head * row->size;
    const float *v = row->v + token * row->v_stride + head * row->size;
    for (whole d = 0; d < row->size; d++) path->by_size_k[d * room + at] = k[d];
    if (backward) {
        for (whole d = 0; d < row->size; d++) path->by_size_v[d * room + at] = v[d];
        memcpy(path->k + at * size, k, row->size * 4);
        path->owner[at] = token;
    } else
        memcpy(path->v + at * size, v, row->size * 4);
    path->depth = at + 1;
}

/* Write the [TOGETHER, count] products of `rows` with `kept` [size, room]. */
INLINE void products(const float *rows, const float *kept, whole size, whole room, whole count, float *out) {
    for (whole j = 0; j < count; j += 2 * LANES) {
        lanes sums[TOGETHER][2] = {0};
        for (whole d = 0; d < size; d++) {
            lanes first = *(const lanes *)(kept + d * room + j);
            lanes second = *(const lanes *)(kept + d * room + j + LANES);
            for (int i = 0; i < TOGETHER; i++) {
                sums[i][0] += rows[i * size + d] * first;
                sums[i][1] += rows[i * size + d] * second;
            }
        }
        for (int i = 0; i < TOGETHER; i++) {
            *(lanes *)(out + i * room + j) = sums[i][0];
            if (j + LANES < room) *(lanes *)(out + i * room + j + LANES) = sums[i][1];
        }
    }
}

/* Write the [TOGETHER, size] weighted sums of `kept` [room, size]. */
INLINE void weighed(const float *weights, const float *kept, whole size, whole room, whole count, float *out) {
    whole d = 0;
    for (; d + 2 * LANES <= size; d += 2 * LANES) {
        lanes sums[TOGETHER][2] = {0};
        for (whole j = 0; j < count; j++)
            for (int i = 0; i < TOGETHER; i++) {
                sums[i][0] += weights[i * room + j] * *(const lanes *)(kept + j * size + d);
                sums[i][1] += weights[i * room + j] * *(const lanes *)(kept + j * size + d + LANES);
            }
        for (int i = 0; i < TOGETHER; i++) {
            *(lanes *)(out + i * size + d) = sums[i][0];
            *(lanes *)(out + i * size + d + LANES) = sums[i][1];
        }
    }
    for (; d < size; d += LANES) {
        lanes sums[TOGETHER] = {0};
        for (whole j = 0; j < count; j++)
            for (int i = 0; i < TOGETHER; i++)
                sums[i] += weights[i * room + j] * *(const lanes *)(kept + j * size + d);
        for (int i = 0; i < TOGETHER; i++) *(lanes *)(out + i * size + d) = sums[i];
    }
}

/* Add to each of `count` rows of `sums` the weighted sum of TOGETHER `rows`. */
INLINE void spread(const float *weights, const float *rows, whole size, whole room, whole count, float *sums) {
    for (whole j = 0; j < count; j++)
        for (whole d = 0; d < size; d += LANES) {
            lanes sum = *(const lanes *)(sums + j * size + d);
            for (int i = 0; i < TOGETHER; i++)
                sum += weights[i * room + j] * *(const lanes *)(rows + i * size + d);
            *(lanes *)(sums + j * size + d) = sum;
        }
}

/* Push tokens until TOGETHER have queries or the path ends. Return the next token. Unused queries see no key. */
INLINE whole next_group(struct path *path, const struct row *row, whole token, whole end, whole head,
                        int backward, whole *query, whole *count, whole *queries) {
    whole n = 0, first = token;
    while (token < end && n < TOGETHER && (token == first || row->position[token] == row->position[token - 1] + 1)) {
        push(path, row, token, head, backward);
        whole place = row->query ? row->query[token] : token;
        if (place >= 0) query[n] = place, count[n++] = row->position[token] + 1;
        token++;
    }
    *queries = n;
    for (whole i = n; i < TOGETHER; i++) count[i] = 0;
    return token;
}

/* Push the path above a token: its ancestors. */
INLINE void reopen(struct path *path, const struct row *row, whole token, whole head, int backward) {
    whole missing = row->position[token] - 1;
    for (whole t = token - 1; missing >= 0; t--)
        if (row->position[t] == missing) push(path, row, t, head, backward), missing--;
    path->depth = row->position[token];
}

INLINE void taken(float *rows, const float *from, whole stride, whole size, whole padded, float scale,
                  const whole *query, whole queries) {
    memset(rows, 0, TOGETHER * padded * 4);
    for (whole i = 0; i < queries; i++)
        for (whole d = 0; d < size; d++) rows[i * padded + d] = from[query[i] * stride + d] * scale;
}

INLINE void forward_part(struct path *path, const struct row *row, whole head, whole begin, whole end,
                         float *out, float *lse, whole size) {
    whole query[TOGETHER], count[TOGETHER], queries, room = path->room, times = row->heads / row->kv_heads;
    for (whole token = begin; token < end;) {
        token = next_group(path, row, token, end, head, 0, query, count, &queries);
        whole keys = queries ? count[queries - 1] : 0;
        for (whole h = head * times; keys && h < (head + 1) * times; h++) {
            float sums[TOGETHER];
            taken(path->q, row->q + h * row->size, row->q_stride, row->size, size, row->scale, query, queries);
            products(path->q, path->by_size_k, size, room, keys, path->scores);
            for (int i = 0; i < TOGETHER; i++) {
                float *score = path->scores + i * room, most = -INFINITY, sum = 0.0f;
                for (whole j = 0; j < count[i]; j++) most = score[j] > most ? score[j] : most;
                for (whole j = 0; j < count[i]; j++) score[j] = power_of_e(score[j] - most);
                for (whole j = 0; j < count[i]; j++) sum += score[j];
                for (whole j = count[i]; j < keys; j++) score[j] = 0.0f;
                sums[i] = sum;
                if (i < queries) lse[query[i] * row->heads + h] = most + logf(sum);
            }
            weighed(path->scores, path->v, size, room, keys, path->q);
            for (whole i = 0; i < queries; i++)
                for (whole d = 0; d < row->size; d++)
                    out[(query[i] * row->heads + h) * row->size + d] = path->q[i * size + d] / sums[i];
        }
    }
}

/* Add the float32 sums to float64 sums: a prefix that thousands of tokens see would lose small contributions. */
INLINE void settle(struct path *path) {
    whole plane = path->size * path->room + 2 * LANES, numbers = path->depth * path->size;
    for (int which = 0; which < 2; which++) {
        float *near = path->near + which * plane;
        double *far = path->far + which * plane;
        for (whole n = 0; n < numbers; n++) far[n] += near[n], near[n] = 0.0f;
    }
}

struct gradients {
    const float *grad, *out, *lse;
    whole grad_stride;
    float *d_q, *d_k, *d_v;
};

/* Locate a part's gradients for its first token's ancestors, which lie in other parts: [2, kv_heads, longest, size]. */
static float *above_part(const struct row *row, float *above, whole part, int which, whole head, whole at) {
    return above + ((((part * 2 + which) * row->kv_heads) + head) * row->longest + at) * row->size;
}

/* Write the gradients of depths from `at` on to the tokens that are kept at these depths, and drop the tokens. */
INLINE void leave(struct path *path, const struct row *row, const struct gradients *of, whole at, whole head,
                  whole part, whole begin, float *above) {
    whole plane = path->size * path->room + 2 * LANES;
    for (whole p = at; p < path->depth; p++)
        for (int which = 0; which < 2; which++) {
            float *near = path->near + which * plane + p * path->size;
            double *far = path->far + which * plane + p * path->size;
            float *to = (which ? of->d_v : of->d_k) + (path->owner[p] * row->kv_heads + head) * row->size;
            if (path->owner[p] < begin) to = above_part(row, above, part, which, head, p);
            for (whole d = 0; d < row->size; d++) to[d] = (float)(far[d] + near[d]);
            memset(near, 0, path->size * 4), memset(far, 0, path->size * 8);
        }
    if (at < path->depth) path->depth = at;
}

INLINE void backward_part(struct path *path, const struct row *row, const struct gradients *of, whole head,
                          whole part, whole begin, whole end, float *above, whole size) {
    whole query[TOGETHER], count[TOGETHER], queries, room = path->room, times = row->heads / row->kv_heads;
    whole plane = path->size * room + 2 * LANES, groups = 0;
    for (whole token = begin; token < end;) {
        leave(path, row, of, row->position[token], head, part, begin, above);
        token = next_group(path, row, token, end, head, 1, query, count, &queries);
        whole keys = queries ? count[queries - 1] : 0;
        for (whole h = head * times; keys && h < (head + 1) * times; h++) {
            taken(path->q, row->q + h * row->size, row->q_stride, row->size, size, row->scale, query, queries);
            taken(path->grad, of->grad + h * row->size, of->grad_stride, row->size, size, 1.0f, query, queries);
            products(path->q, path->by_size_k, size, room, keys, path->scores);
            products(path->grad, path->by_size_v, size, room, keys, path->slopes);
            for (int i = 0; i < TOGETHER; i++) {
                float *score = path->scores + i * room, *slope = path->slopes + i * room;
                if (count[i]) {
                    whole place = query[i] * row->heads + h;
                    float lse = of->lse[place];
                    float own = dot(path->grad + i * size, of->out + place * row->size, row->size);
                    for (whole j = 0; j < count[i]; j++) score[j] = power_of_e(score[j] - lse);
                    for (whole j = 0; j < count[i]; j++) slope[j] = score[j] * (slope[j] - own);
                }
                for (whole j = count[i]; j < keys; j++) score[j] = slope[j] = 0.0f;
            }
            spread(path->slopes, path->q, size, room, keys, path->near); /* `q` is scaled already */
            spread(path->scores, path->grad, size, room, keys, path->near + plane);
            weighed(path->slopes, path->k, size, room, keys, path->q);
            for (whole i = 0; i < queries; i++)
                for (whole d = 0; d < row->size; d++)
                    of->d_q[(query[i] * row->heads + h) * row->size + d] = path->q[i * size + d] * row->scale;
        }
        if (++groups % SETTLED == 0) settle(path);
    }
    leave(path, row, of, 0, head, part, begin, above);
}

/* path_forward and path_backward work in `parts` of the row for each key-value head. They return 0 without memory. */
int path_forward(const struct row *row, float *out, float *lse, int parts, int threads) {
    int done = 1;
#pragma omp parallel for collapse(2) schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int part = 0; part < parts; part++)
        for (whole head = 0; head < row->kv_heads; head++) {
            struct path path;
            whole begin = row->tokens * part / parts, end = row->tokens * (part + 1) / parts;
            if (!open_path(&path, row, 0)) { done = 0; continue; }
            if (begin < end) reopen(&path, row, begin, head, 0);
            if (path.size == 32) forward_part(&path, row, head, begin, end, out, lse, 32);
            else if (path.size == 64) forward_part(&path, row, head, begin, end, out, lse, 64);
            else if (path.size == 128) forward_part(&path, row, head, begin, end, out, lse, 128);
            else forward_part(&path, row, head, begin, end, out, lse, path.size);
            free(path.memory);
        }
    return done;
}

/* Add each part's gradients for ancestors to their tokens, part by part: the order of sums is fixed. */
static void add_above(const struct row *row, const struct gradients *of, float *above, int parts) {
    for (whole part = 1; part < parts; part++) {
        whole begin = row->tokens * part / parts;
        if (begin == row->tokens * (part + 1) / parts) continue;
        whole missing = row->position[begin] - 1;
        for (whole t = begin - 1; missing >= 0; t--) {
            if (row->position[t] != missing) continue;
            for (int which = 0; which < 2; which++)
                for (whole head = 0; head < row->kv_heads; head++) {
                    float *to = (which ? of->d_v : of->d_k) + (t * row->kv_heads + head) * row->size;
                    const float *from = above_part(row, above, part, which, head, missing);
                    for (whole d = 0; d < row->size; d++) to[d] += from[d];
                }
            missing--;
        }
    }
}

int path_backward(const struct row *row, const struct gradients *of, int parts, int threads) {
    int done = 1;
    float *above = malloc(sizeof(float) * 2 * parts * row->kv_heads * row->longest * row->size);
    if (!above) return 0;
#pragma omp parallel for collapse(2) schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int part = 0; part < parts; part++)
        for (whole head = 0; head < row->kv_heads; head++) {
            struct path path;
            whole begin = row->tokens * part / parts, end = row->tokens * (part + 1) / parts;
            if (!open_path(&path, row, 1)) { done = 0; continue; }
            if (begin < end) reopen(&path, row, begin, head, 1);
            if (path.size == 32) backward_part(&path, row, of, head, part, begin, end, above, 32);
            else if (path.size == 64) backward_part(&path, row, of, head, part, begin, end, above, 64);
            else if (path.size == 128) backward_part(&path, row, of, head, part, begin, end, above, 128);
            else backward_part(&path, row, of, head, part, begin, end, above, path.size);
            free(path.memory);
        }
    if (done) add_above(row, of, above, parts);
    free(above);
    return done;
}
