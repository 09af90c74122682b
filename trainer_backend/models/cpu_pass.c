/* A whole pass of a small decoder on a CPU, in float32, and the sampling of tokens. This file is compiled after
   cpu_kernels.c, in one unit, and uses its functions. A pass by torch makes fifty calls from Python, each with an
   overhead of some microseconds; this pass makes one call, during which Python's other threads run. */

#define VECTORS 3
#define PANEL (VECTORS * LANES) /* outputs whose weights are stored together */
#if LANES == 16
#define BAND 8 /* tokens at a time: their sums for PANEL outputs fill the registers */
#else
#define BAND 4
#endif
whole panel_outputs(void) { return PANEL; }

#define PORTION 64 /* tokens that a thread computes at a time: their intermediate results fit in the core's caches */

/* y = x w' + b. `panels` is w as [panels, inputs, PANEL], the last panel padded with zeros; `bias` may be null. */
struct matrix {
    const float *panels, *bias;
    whole outputs, inputs;
};

/* Matrices with the same input are stacked into one. query_norm and key_norm may be null. */
struct layer {
    struct matrix query_key_value, out, gate_up, down;
    const float *attention_norm, *query_norm, *key_norm, *mlp_norm;
    float *keys, *values; /* the cache: [rows, kv_heads, room, size] */
    whole key_room, value_room;
};

struct model {
    struct layer *layers;
    struct matrix head;
    const float *embedding, *norm, *cos, *sin; /* [vocabulary, width], [width], [positions, size], [positions, size] */
    whole layer_count, width, heads, kv_heads, size, mlp;
    float eps;
};

/* A trunk: first tokens that rows share. Keys and values of each layer, [kv_heads, length, size]. */
struct trunk {
    const float *const *keys, *const *values;
    whole length;
};

/* The tokens of a pass: id, position, row and column in the cache, and the trunk of the row, null for none. */
struct tokens {
    const whole *id, *position, *row, *column;
    const struct trunk *const *trunk;
    whole count;
};

/* Compute [rows, PANEL] products; write the first `outputs` columns to `out`, or add them if `adds`. */
INLINE void multiply_band(const float *x, whole x_stride, const float *w, whole inputs, const float *bias, float *out,
                          whole out_stride, whole outputs, int rows, int adds) {
    lanes sums[BAND][VECTORS] = {0};
    for (whole k = 0; k < inputs; k++, w += PANEL)
        for (int n = 0; n < VECTORS; n++) {
            lanes of_w = *(const lanes *)(w + n * LANES);
            for (int i = 0; i < rows; i++) sums[i][n] += x[i * x_stride + k] * of_w;
        }
    for (int i = 0; i < rows; i++) {
        float *to = out + i * out_stride;
        if (outputs >= PANEL && !bias)
            for (int n = 0; n < VECTORS; n++) {
                lanes *at = (lanes *)(to + n * LANES);
                if (adds) sums[i][n] += *at;
                *at = sums[i][n];
            }
        else {
            const float *sum = (const float *)sums[i];
            for (whole o = 0; o < outputs && o < PANEL; o++)
                to[o] = sum[o] + (bias ? bias[o] : 0.0f) + (adds ? to[o] : 0.0f);
        }
    }
}

/* Compute all outputs from the first one of `panel` on, for all tokens. */
static void multiply(const struct matrix *of, const float *x, whole x_stride, whole tokens, whole panel, float *out,
                     whole out_stride, int adds) {
#define PRODUCT(rows)                                                                                   \
    multiply_band(x + t * x_stride, x_stride, w, of->inputs, of->bias ? of->bias + first : 0,           \
                  out + t * out_stride + first, out_stride, of->outputs - first, rows, adds)
    for (whole first = panel * PANEL; first < of->outputs; first += PANEL) {
        const float *w = of->panels + first * of->inputs;
        whole t = 0;
        for (; t + BAND <= tokens; t += BAND) PRODUCT(BAND);
        for (; t + 4 <= tokens; t += 4) PRODUCT(4);
        for (; t + 2 <= tokens; t += 2) PRODUCT(2);
        if (t < tokens) PRODUCT(1);
    }
#undef PRODUCT
}

/* Memory of a pass: first for all tokens, then for the PORTION that a thread computes. */
struct space {
    float *states, *heads; /* [tokens, width], and [tokens, heads + 2 kv_heads, size] */
    float *near, *wide; /* [PORTION, width or heads * size], [PORTION, 2 mlp] */
};

INLINE void turn_heads(const struct model *model, const struct layer *layer, float *heads, whole first,
                       const float *cos, const float *sin, whole size) {
    float turned[WIDEST];
    for (whole h = first; h < model->heads + model->kv_heads; h++) {
        const float *weight = h < model->heads ? layer->query_norm : layer->key_norm;
        norm_and_turn(heads + h * size, weight, model->eps, cos, sin, size, turned);
        memcpy(heads + h * size, turned, size * sizeof(float));
    }
}

/* Compute and rotate the heads of a layer; write keys and values to the cache. With `keys_only`, skip the queries. */
static void open_layer(const struct model *model, const struct layer *layer, const struct tokens *tokens,
                       const struct space *space, whole first, whole count, int keys_only) {
    whole size = model->size, queries = model->heads * size, keys = model->kv_heads * size, all = queries + 2 * keys;
    whole from = keys_only ? model->heads : 0;
    float *heads = space->heads + first * all;
    for (whole t = 0; t < count; t++)
        norm_row(space->states + (first + t) * model->width, layer->attention_norm, model->eps, model->width,
                 space->near + t * model->width);
    multiply(&layer->query_key_value, space->near, model->width, count, keys_only ? queries / PANEL : 0, heads, all, 0);
    for (whole t = 0; t < count; t++, heads += all) {
        const float *cos = model->cos + tokens->position[first + t] * size;
        const float *sin = model->sin + tokens->position[first + t] * size;
        if (size == 32) turn_heads(model, layer, heads, from, cos, sin, 32);
        else if (size == 64) turn_heads(model, layer, heads, from, cos, sin, 64);
        else turn_heads(model, layer, heads, from, cos, sin, size);
        for (whole h = 0; h < model->kv_heads; h++) {
            whole row = tokens->row[first + t] * model->kv_heads + h, column = tokens->column[first + t];
            memcpy(layer->keys + (row * layer->key_room + column) * size, heads + queries + h * size, size * 4);
            memcpy(layer->values + (row * layer->value_room + column) * size, heads + queries + keys + h * size, size * 4);
        }
    }
}

/* Attend with the queries of one key-value head to their row's columns and its trunk, under one softmax. */
INLINE void attend_row(const float *q, whole times, const struct layer *layer, const struct trunk *trunk, whole number,
                       whole row, whole head, whole count, whole size, float *out) {
    float lse[WIDEST], scale = 1.0f / sqrtf((float)size);
    const float *k = layer->keys + row * layer->key_room * size, *v = layer->values + row * layer->value_room * size;
    attend_head(q, times, k, v, k, count, scale, size, out, lse);
    if (!trunk) return;
    for (whole h = 0; h < times; h++) {
        float part[WIDEST], of_part;
        const float *keys = trunk->keys[number] + head * trunk->length * size;
        const float *values = trunk->values[number] + head * trunk->length * size;
        attend_some(q + h * size, 1, keys, values, keys, trunk->length, scale, size, part, &of_part);
        float most = lse[h] > of_part ? lse[h] : of_part;
        float own = power_of_e(lse[h] - most), other = power_of_e(of_part - most), sum = own + other;
        for (whole d = 0; d < size; d++) out[h * size + d] = (out[h * size + d] * own + part[d] * other) / sum;
    }
}

/* Compute the rest of a layer (attention and MLP), and add it to the states. */
static void close_layer(const struct model *model, whole number, const struct tokens *tokens, const struct space *space,
                        whole first, whole count) {
    const struct layer *layer = model->layers + number;
    whole size = model->size, queries = model->heads * size, all = queries + 2 * model->kv_heads * size;
    whole times = model->heads / model->kv_heads, width = model->width, mlp = model->mlp;
    float *states = space->states + first * width;
    for (whole t = 0; t < count; t++)
        for (whole head = 0; head < model->kv_heads; head++) {
            whole token = first + t, row = tokens->row[token] * model->kv_heads + head;
            const float *q = space->heads + token * all + head * times * size;
            const struct trunk *trunk = tokens->trunk[token];
            float *out = space->near + t * queries + head * times * size;
            whole seen = tokens->column[token] + 1;
            if (size == 32) attend_row(q, times, layer, trunk, number, row, head, seen, 32, out);
            else if (size == 64) attend_row(q, times, layer, trunk, number, row, head, seen, 64, out);
            else attend_row(q, times, layer, trunk, number, row, head, seen, size, out);
        }
    multiply(&layer->out, space->near, queries, count, 0, states, width, 1);
    for (whole t = 0; t < count; t++)
        norm_row(states + t * width, layer->mlp_norm, model->eps, width, space->near + t * width);
    multiply(&layer->gate_up, space->near, width, count, 0, space->wide, 2 * mlp, 0);
    for (whole t = 0; t < count; t++) {
        float *gate = space->wide + 2 * t * mlp;
        gated_row(gate, gate + mlp, mlp, gate);
    }
    multiply(&layer->down, space->wide, 2 * mlp, count, 0, states, width, 1);
}

/* Draw one token from each row of logits, as `inference.sampler.sample` does without truncation: the first token
   whose cumulative probability exceeds uniform * total, or the likeliest one if the temperature is 0. If logits have
   a NaN or +inf, the log-prob is NaN. Return 0 if memory runs out. */
static int draw(const float *logits, whole rows, whole vocabulary, const double *temperature, const double *uniform,
                whole *ids, double *logprobs) {
    double *cumulated = malloc((sizeof(double) + sizeof(float)) * vocabulary);
    float *share = (float *)(cumulated + vocabulary);
    if (!cumulated) return 0;
    for (whole row = 0; row < rows; row++, logits += vocabulary) {
        float given = (float)temperature[row], divisor = given == 0.0f ? 1.0f : given, highest = -INFINITY;
        double total = 0.0;
        whole token = 0;
        for (whole v = 0; v < vocabulary; v++) highest = logits[v] > highest ? logits[v] : highest;
        for (whole v = 0; v < vocabulary; v++) share[v] = power_of_e((logits[v] - highest) / divisor);
        for (whole v = 0; v < vocabulary; v++) cumulated[v] = total += share[v];
        if (given == 0.0f)
            while (token < vocabulary - 1 && logits[token] != highest) token++;
        else /* uniform < 1, so the sum at some token exceeds it; the first such token has a probability above 0 */
            while (token < vocabulary - 1 && !(cumulated[token] > uniform[row] * total)) token++;
        ids[row] = token;
        logprobs[row] = (float)((double)((logits[token] - highest) / divisor) - log(total));
    }
    free(cumulated);
    return 1;
}

/* Store keys and values of the tokens. Unless `logits` is null, write the logits of each next token,
   [tokens, vocabulary]; unless `uniform` is null, draw the next tokens. Return 0 if memory runs out. */
int small_pass(const struct model *model, const struct tokens *tokens, float *logits, const double *temperature,
               const double *uniform, whole *ids, double *logprobs, int threads) {
    whole width = model->width, queries = model->heads * model->size, last = model->layer_count - 1;
    whole all = queries + 2 * model->kv_heads * model->size, near = width > queries ? width : queries;
    whole portions = (tokens->count + PORTION - 1) / PORTION;
    threads = threads < portions ? threads : (int)portions;
    whole of_thread = PORTION * (near + 2 * model->mlp) + 16;
    float *memory = malloc(sizeof(float) * (tokens->count * (width + all) + threads * of_thread));
    if (!memory) return 0;
    for (whole t = 0; t < tokens->count; t++)
        memcpy(memory + t * width, model->embedding + tokens->id[t] * width, width * sizeof(float));
    for (whole step = 0; step < 2 * model->layer_count + 1; step++) {
        whole number = step / 2;
        if (!logits && step > 2 * last) break;
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1)
        for (int part = 0; part < threads; part++) {
            struct space space = {memory, memory + tokens->count * width};
            space.near = space.heads + tokens->count * all + part * of_thread;
            space.wide = space.near + PORTION * near;
            for (whole portion = part; portion < portions; portion += threads) {
                whole first = portion * PORTION;
                whole count = tokens->count - first < PORTION ? tokens->count - first : PORTION;
                if (number == model->layer_count) {
                    for (whole t = 0; t < count; t++)
                        norm_row(memory + (first + t) * width, model->norm, model->eps, width, space.near + t * width);
                    multiply(&model->head, space.near, width, count, 0, logits + first * model->head.outputs,
                             model->head.outputs, 0);
                } else if (step % 2 == 0)
                    open_layer(model, model->layers + number, tokens, &space, first, count, !logits && number == last);
                else
                    close_layer(model, number, tokens, &space, first, count);
            }
        }
    }
    free(memory);
    return !uniform || draw(logits, tokens->count, model->head.outputs, temperature, uniform, ids, logprobs);
}
