/* What lies between a decoder's products on a CPU, in float32; trainer_backend/models/cpu_kernels.py has the
   formulas. Tensors of tokens have any stride between tokens, and none within one. Built without
   -ffinite-math-only: a NaN of broken weights must reach the log-probs, where the engine finds it. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 128 /* keys whose scores exist at a time */
#define WIDEST 256 /* numbers of a head at most */
#define INLINE static inline __attribute__((always_inline))
typedef int64_t whole;

/* exp(x) to 1e-7 of it: 2^n times a polynomial of the rest (Cephes, expf). */
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

void rms_norm(const float *x, const float *weight, float eps, whole tokens, whole width, float *out,
              int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (whole t = 0; t < tokens; t++) {
        const float *from = x + t * width;
        float *to = out + t * width, inverse = 1.0f / sqrtf(dot(from, from, width) / (float)width + eps);
        for (whole d = 0; d < width; d++) to[d] = from[d] * inverse * weight[d];
    }
}

INLINE void turn(const float *x, const float *weight, float eps, const float *cos, const float *sin,
                 whole size, float *out) {
    float normed[WIDEST], inverse = weight ? 1.0f / sqrtf(dot(x, x, size) / (float)size + eps) : 1.0f;
    whole half = size / 2;
    for (whole d = 0; d < size; d++) normed[d] = weight ? x[d] * inverse * weight[d] : x[d];
    for (whole d = 0; d < half; d++) {
        out[d] = normed[d] * cos[d] + normed[d + half] * sin[d];
        out[d + half] = normed[d + half] * cos[d + half] + normed[d] * sin[d + half];
    }
}

void rotary(const float *x, whole stride, whole tokens, whole heads, whole keys, whole size,
            const float *by_query, const float *by_key, float eps, const float *cos, const float *sin,
            const whole *position, float *out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (whole t = 0; t < tokens; t++)
        for (whole h = 0; h < heads; h++) {
            float *to = out + (t * heads + h) * size;
            const float *from = x + t * stride + h * size, *weight = h < heads - keys ? by_query : by_key;
            const float *c = cos + position[t] * size, *s = sin + position[t] * size;
            if (size == 32) turn(from, weight, eps, c, s, 32, to);
            else if (size == 64) turn(from, weight, eps, c, s, 64, to);
            else turn(from, weight, eps, c, s, size, to);
        }
}

void swiglu(const float *gate_up, whole tokens, whole width, float *out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (whole t = 0; t < tokens; t++) {
        const float *gate = gate_up + 2 * t * width, *up = gate + width;
        float *to = out + t * width;
        for (whole d = 0; d < width; d++) to[d] = gate[d] / (1.0f + power_of_e(-gate[d])) * up[d];
    }
}

/* Keys and values of tokens to their places, [slots * heads, room, size]; both may have other rooms. */
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

/* One query over `count` keys, in blocks whose softmax is joined as it comes. */
INLINE void attend_one(const float *q, const float *keys, const float *values, whole count, float scale,
                       whole size, float *out, float *lse) {
    float highest = -INFINITY, sum = 0.0f, mixed[WIDEST], share[BLOCK], query[WIDEST];
    for (whole d = 0; d < size; d++) mixed[d] = 0.0f, query[d] = q[d] * scale;
    for (whole first = 0; first < count; first += BLOCK, keys += BLOCK * size, values += BLOCK * size) {
        whole some = count - first < BLOCK ? count - first : BLOCK;
        float most = highest;
        for (whole j = 0; j < some; j++) share[j] = dot(query, keys + j * size, size);
        for (whole j = 0; j < some; j++) most = share[j] > most ? share[j] : most;
        float kept = power_of_e(highest - most);
        highest = most, sum *= kept;
        for (whole d = 0; d < size; d++) mixed[d] *= kept;
        for (whole j = 0; j < some; j++) share[j] = power_of_e(share[j] - most);
        for (whole j = 0; j < some; j++) sum += share[j];
        for (whole j = 0; j < some; j++)
            for (whole d = 0; d < size; d++) mixed[d] += share[j] * values[j * size + d];
    }
    for (whole d = 0; d < size; d++) out[d] = mixed[d] / sum;
    *lse = highest + logf(sum);
}

/* Each token over its row's keys up to its own column. */
void attend(const float *q, whole stride, const float *keys, const float *values, whole tokens, whole heads,
            whole kv_heads, whole size, whole key_room, whole value_room, const whole *head, const whole *column,
            float scale, float *out, float *lse, int threads) {
    whole times = heads / kv_heads;
#pragma omp parallel for schedule(dynamic, 8) num_threads(threads) if (threads > 1)
    for (whole t = 0; t < tokens; t++)
        for (whole h = 0; h < heads; h++) {
            whole row = head[t * kv_heads + h / times], count = column[t] + 1;
            const float *query = q + t * stride + h * size;
            const float *k = keys + row * key_room * size, *v = values + row * value_room * size;
            float *to = out + (t * heads + h) * size, *sum = lse + t * heads + h;
            if (size == 32) attend_one(query, k, v, count, scale, 32, to, sum);
            else if (size == 64) attend_one(query, k, v, count, scale, 64, to, sum);
            else if (size == 128) attend_one(query, k, v, count, scale, 128, to, sum);
            else attend_one(query, k, v, count, scale, size, to, sum);
        }
}
