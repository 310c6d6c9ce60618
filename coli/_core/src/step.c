#include "step.h"

#include <math.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num(void) { return 0; }
#endif

/* A thread's view of a run: who it is and which phase it is in. A phase is a stretch between two
 * barriers, or one of several loops in it; its number tells the shares apart. */
typedef struct ctx {
    coli_runner *r;
    const coli_kernels *k;
    const coli_network *net;
    coli_buffers *b;
    int tid;             /* of the region: scratch, counters */
    int rank, n_threads; /* among the active threads: shares of work */
    int first, last;     /* operations of this run */
    const coli_given *given; /* what MOE takes in place of NORM2's; else NULL */
    coli_hint hint;
    uint32_t phase;
    int64_t bytes;
    uint8_t *scratch;
} ctx;

#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

/* ---- sharing work ------------------------------------------------------------------------------- */

/* Walk items [0, n): the own share in order, then what the others have left. Every thread must come by
 * every loop in the same order, since the phase number is what tells one loop's shares from the next's. */
typedef struct walk {
    int n, victim, item;
} walk;

static inline walk walk_begin(ctx *c, int n)
{
    c->phase++;
    return (walk){n, 0, 0};
}

static inline int walk_next(ctx *c, walk *w)
{
    for (; w->victim < c->n_threads; w->victim++) {
        int who = (c->rank + w->victim) % c->n_threads;
        int base = coli_share_begin(w->n, who, c->n_threads);
        int got = coli_claim(c->r->team, who, c->phase, coli_share_begin(w->n, who + 1, c->n_threads) - base);
        if (got >= 0) {
            w->item = base + got;
            return 1;
        }
    }
    return 0;
}

#define FOR_ITEMS(c, n, i)                                                                                       \
    for (walk i##_walk = walk_begin(c, n); walk_next(c, &i##_walk);)                                             \
        for (int i = i##_walk.item, i##_once = 1; i##_once; i##_once = 0)

static void barrier(ctx *c) { coli_barrier(c->r->team, c->tid, &c->hint, NULL, NULL); }

/* A step over rows that is too short to share when there is one row: then the last thread to reach the
 * barrier does it, and one barrier serves both. More rows are shared out. */
typedef void (*row_fn)(coli_runner *r, int row, const coli_layer *l);
typedef struct row_call {
    coli_runner *r;
    const coli_layer *l;
    row_fn fn;
    void (*then)(void *);
} row_call;

static void run_one_row(void *arg)
{
    row_call *call = arg;
    call->fn(call->r, 0, call->l);
    if (call->then)
        call->then(call->r);
}

/* fn for every row, then then(runner) once; behind it, both are done for all threads. */
static void barrier_rows(ctx *c, row_fn fn, int n_rows, const coli_layer *l, void (*then)(void *))
{
    if (n_rows == 1) {
        row_call call = {c->r, l, fn, then};
        coli_barrier(c->r->team, c->tid, &c->hint, run_one_row, &call);
        return;
    }
    barrier(c);
    FOR_ITEMS(c, n_rows, row)
        fn(c->r, row, l);
    coli_barrier(c->r->team, c->tid, &c->hint, then, c->r);
}

/* ---- matrix products ------------------------------------------------------------------------------ */

static inline int is_r16(const coli_matrix *m) { return m->format <= COLI_I4_GROUP; }

static inline const uint8_t *block(const coli_matrix *m, int i) { return m->data + (int64_t)i * m->block_bytes; }

/* How much a waiting thread fetches of what it reads next: a part of a small L2. */
#define HINT_BYTES (24 << 10)

/* Point the hint at this thread's share of a matrix. One row only: with more, a product is no matter of memory. */
static void hint_matrix(ctx *c, const coli_matrix *m)
{
    int b0 = coli_share_begin(m->n_blocks, c->rank, c->n_threads);
    int n = coli_share_begin(m->n_blocks, c->rank + 1, c->n_threads) - b0, steps = (n + COLI_STREAMS - 1) / COLI_STREAMS;
    c->hint.left = 0;
    if (c->r->batch.n_rows != 1 || n < COLI_STREAMS)
        return;
    for (int s = 0; s < COLI_STREAMS; s++)
        c->hint.stream[s] = block(m, MIN(b0 + s * steps, b0 + n - 1));
    c->hint.left = MIN((int64_t)HINT_BYTES, steps * m->block_bytes);
}

/* y (n_tokens, stride) = W x for all rows; the caller sets the barrier. One token: four streams a
 * thread, each continuous over the thread's whole share. Several: items of four blocks, each read once. */
static void matmul(ctx *c, const coli_matrix *m, const coli_acts *a, const float *x, int64_t x_stride, int n_tokens,
                   float *y, int64_t y_stride)
{
    if (!is_r16(m)) {
        int at_once = n_tokens == 1 ? 4 : 16; /* few rows make few items, and a lone token waits for the last */
        FOR_ITEMS(c, (m->rows + at_once - 1) / at_once, item) {
            int r0 = item * at_once, r1 = MIN(r0 + at_once, m->rows);
            c->k->dense[m->format - COLI_F32](m->data, m->block_bytes, m->cols, r0, r1, x, x_stride, n_tokens, y,
                                              y_stride);
            c->bytes += (r1 - r0) * m->block_bytes;
        }
        return;
    }
    if (n_tokens == 1) {
        coli_gemv_fn gemv = c->k->gemv[m->format];
        c->phase++;
        for (int v = 0; v < c->n_threads; v++) {
            int who = (c->rank + v) % c->n_threads;
            int b0 = coli_share_begin(m->n_blocks, who, c->n_threads);
            int n = coli_share_begin(m->n_blocks, who + 1, c->n_threads) - b0;
            int steps = (n + COLI_STREAMS - 1) / COLI_STREAMS, j;
            while ((j = coli_claim(c->r->team, who, c->phase, steps)) >= 0) {
                const uint8_t *blocks[COLI_STREAMS];
                float *out[COLI_STREAMS];
                int streams = 0;
                for (int s = 0; s < COLI_STREAMS && s * steps + j < n; s++, streams++) {
                    blocks[s] = block(m, b0 + s * steps + j);
                    out[s] = y + (int64_t)(b0 + s * steps + j) * COLI_BLOCK_ROWS;
                }
                gemv(blocks, streams, m->n_groups, a, 0, out);
                c->bytes += streams * m->block_bytes;
            }
        }
        return;
    }
    coli_gemm_fn gemm = c->k->gemm[m->format];
    FOR_ITEMS(c, (m->n_blocks + COLI_STREAMS - 1) / COLI_STREAMS, item) {
        const uint8_t *blocks[COLI_STREAMS];
        float *out[COLI_STREAMS];
        int b0 = item * COLI_STREAMS, n = MIN(COLI_STREAMS, m->n_blocks - b0);
        for (int s = 0; s < n; s++) {
            blocks[s] = block(m, b0 + s);
            out[s] = y + (int64_t)(b0 + s) * COLI_BLOCK_ROWS;
        }
        gemm(blocks, n, m->n_groups, a, NULL, n_tokens, out, y_stride, c->scratch);
        c->bytes += n * m->block_bytes;
    }
}

/* ---- NORM1, MIX_IN -------------------------------------------------------------------------------- */

static inline float *row_of(float *base, int64_t stride, int row) { return base + row * stride; }

static void norm_rows(coli_runner *r, int row, const float *w)
{
    const coli_geometry *g = &r->net->g;
    coli_buffers *b = &r->b;
    float *xn = row_of(b->xn, b->hidden_pad, row);
    r->k->rmsnorm(row_of(b->x, b->hidden_pad, row), w, g->hidden_size, g->eps, xn);
    r->k->quantize(xn, g->hidden_size, &b->acts, row);
}

static void norm1_row(coli_runner *r, int row, const coli_layer *l) { norm_rows(r, row, l->norm1); }

/* ---- DeltaNet --------------------------------------------------------------------------------------- */

static void deltanet_conv(ctx *c, const coli_layer *l, int part_no, int piece)
{
    const coli_geometry *g = &c->net->g;
    coli_buffers *b = c->b;
    const coli_part *part = &c->r->batch.parts[part_no];
    float *ring = part->seq->conv[l->state_index];
    int n_qk = g->dn_k_heads, taps = g->conv_taps;
    int64_t channels = g->conv_channels;
    if (!ring)
        return;
    /* pieces: every q head, every k head, then the v of every value head */
    int c0, c1;
    if (piece < 2 * n_qk) {
        c0 = piece * g->dn_k_dim;
        c1 = c0 + g->dn_k_dim;
    } else {
        c0 = 2 * n_qk * g->dn_k_dim + (piece - 2 * n_qk) * g->dn_v_dim;
        c1 = c0 + g->dn_v_dim;
    }
    for (int i = 0; i < part->n_rows; i++) {
        int row = part->first_row + i;
        const float *rows[16];
        float *out = row_of(b->conv, channels, row);
        for (int j = 0; j < taps; j++) { /* tap j meets the row of taps-1-j tokens ago */
            int back = taps - 1 - j;
            int64_t position = part->position + i - back;
            rows[j] = back <= i ? row_of(b->proj, b->proj_pad, row - back)
                                : ring + ((position % taps + taps) % taps) * channels;
        }
        c->k->conv_silu(rows, l->conv, channels, taps, c0, c1, out);
        if (piece < n_qk)
            c->k->l2norm(out + c0, g->dn_k_dim, g->q_scale, out + c0);
        else if (piece < 2 * n_qk)
            c->k->l2norm(out + c0, g->dn_k_dim, 1.0f, out + c0);
    }
    /* Only this piece reads and writes these channels of the ring, and it has read all it needs. */
    for (int i = MAX(0, part->n_rows - taps); i < part->n_rows; i++) {
        int64_t slot = (part->position + i) % taps;
        memcpy(ring + slot * channels + c0, row_of(b->proj, b->proj_pad, part->first_row + i) + c0,
               (size_t)(c1 - c0) * 4);
    }
}

/* The values of o that a head makes are whole groups where its width is a multiple of 128 (it is, in the real
 * models): then the head quantises them itself, and MIX_OUT needs no pass and no barrier of its own. */
static inline int quantises_heads(const coli_layer *l, int width) { return is_r16(&l->out) && width % COLI_GROUP == 0; }

static void quantize_head(ctx *c, const coli_layer *l, int row, int head, int width)
{
    int per = width / COLI_GROUP;
    if (quantises_heads(l, width))
        c->k->quantize_groups(row_of(c->b->o, c->b->mix_pad, row), l->out.cols, &c->b->acts_o, row, head * per,
                              (head + 1) * per);
}

static void deltanet_head(ctx *c, const coli_layer *l, int part_no, int head)
{
    const coli_geometry *g = &c->net->g;
    const coli_kernels *k = c->k;
    coli_buffers *b = c->b;
    const coli_part *part = &c->r->batch.parts[part_no];
    int dk = g->dn_k_dim, dv = g->dn_v_dim, key_head = head / (g->dn_v_heads / g->dn_k_heads);
    float *state = part->seq->state[l->state_index];
    if (!state)
        return;
    state += (int64_t)head * dk * dv;
    for (int i = 0; i < part->n_rows; i++) {
        int row = part->first_row + i;
        const float *u = row_of(b->conv, g->conv_channels, row);
        const float *ba = row_of(b->ba, 2 * g->dn_v_heads, row);
        const float *z = row_of(b->proj, b->proj_pad, row) + g->conv_channels + head * dv;
        float *o = row_of(b->o, b->mix_pad, row) + head * dv;
        float beta, soft, a = ba[g->dn_v_heads + head] + l->dt_bias[head], decay;
        k->sigmoid(&ba[head], &beta, 1);
        k->softplus(&a, &soft, 1);
        decay = -(l->exp_a_log[head] * soft);
        k->exp_(&decay, &decay, 1);
        k->deltanet(state, dk, dv, u + key_head * dk, u + (g->dn_k_heads + key_head) * dk,
                    u + 2 * g->dn_k_heads * dk + head * dv, decay, beta, o);
        k->gated_rmsnorm(o, z, l->dn_norm, dv, g->eps, o);
        quantize_head(c, l, row, head, dv);
    }
}

static void deltanet_core(ctx *c, const coli_layer *l)
{
    const coli_geometry *g = &c->net->g;
    const coli_batch *batch = &c->r->batch;
    int pieces = 2 * g->dn_k_heads + g->dn_v_heads;
    matmul(c, &l->ba, NULL, c->b->xn, c->b->hidden_pad, batch->n_rows, c->b->ba, 2 * g->dn_v_heads);
    FOR_ITEMS(c, batch->n_parts * pieces, item)
        deltanet_conv(c, l, item / pieces, item % pieces);
    barrier(c);
    FOR_ITEMS(c, batch->n_parts * g->dn_v_heads, item)
        deltanet_head(c, l, item / g->dn_v_heads, item % g->dn_v_heads);
    barrier(c);
}

/* ---- attention ---------------------------------------------------------------------------------------- */

static inline int keeps_kv(const coli_seq *seq, const coli_layer *l)
{
    return seq->k_blocks[l->state_index * seq->max_blocks] != NULL;
}

static inline void *kv_head(const coli_geometry *g, void **blocks, int64_t max_blocks, int layer, int64_t chunk, int head)
{
    size_t bytes = (size_t)head * COLI_KV_BLOCK * g->head_dim * (g->kv_f16 ? 2 : 4);
    return (uint8_t *)blocks[layer * max_blocks + chunk] + bytes;
}

/* q/k norm and RoPE of one head of one row; k and v go to the cache. */
static void attention_prepare(ctx *c, const coli_layer *l, int row, int head)
{
    const coli_geometry *g = &c->net->g;
    const coli_kernels *k = c->k;
    coli_buffers *b = c->b;
    const coli_part *part = &c->r->batch.parts[c->r->batch.part_of[row]];
    int64_t position = part->position + row - part->first_row;
    const float *cos_ = c->r->batch.rope_cos + position * g->rotary_half;
    const float *sin_ = c->r->batch.rope_sin + position * g->rotary_half;
    int d = g->head_dim;
    const float *proj = row_of(b->proj, b->proj_pad, row);
    if (!keeps_kv(part->seq, l))
        return;
    if (head < g->n_q_heads) {
        float *q = row_of(b->q, g->n_q_heads * d, row) + head * d;
        k->rmsnorm(proj + (int64_t)head * 2 * d, l->q_norm, d, g->eps, q);
        k->rope(q, cos_, sin_, g->rotary_half);
        return;
    }
    head -= g->n_q_heads;
    coli_seq *seq = part->seq;
    int64_t chunk = position / COLI_KV_BLOCK, at = position % COLI_KV_BLOCK;
    void *keys = kv_head(g, seq->k_blocks, seq->max_blocks, l->state_index, chunk, head);
    void *values = kv_head(g, seq->v_blocks, seq->max_blocks, l->state_index, chunk, head);
    const float *v = proj + ((int64_t)2 * g->n_q_heads + g->n_kv_heads + head) * d;
    float *key = (float *)c->scratch;
    k->rmsnorm(proj + ((int64_t)2 * g->n_q_heads + head) * d, l->k_norm, d, g->eps, key);
    k->rope(key, cos_, sin_, g->rotary_half);
    if (g->kv_f16) {
        k->to_f16(key, (uint16_t *)keys + at * d, d);
        k->to_f16(v, (uint16_t *)values + at * d, d);
    } else {
        memcpy((float *)keys + at * d, key, (size_t)d * 4);
        memcpy((float *)values + at * d, v, (size_t)d * 4);
    }
}

static float max_of(const float *s, int64_t n, float max)
{
    for (int64_t i = 0; i < n; i++)
        max = s[i] > max ? s[i] : max;
    return max;
}

static inline int chunk_length(int64_t n_context, int64_t chunk)
{
    return (int)MIN((int64_t)COLI_KV_BLOCK, n_context - chunk * COLI_KV_BLOCK);
}

/* All query heads of one K/V head of one row, all chunks ascending. */
static void attention_whole(ctx *c, const coli_layer *l, int row, int kv)
{
    const coli_geometry *g = &c->net->g;
    const coli_kernels *k = c->k;
    coli_buffers *b = c->b;
    const coli_part *part = &c->r->batch.parts[c->r->batch.part_of[row]];
    coli_seq *seq = part->seq;
    int64_t n_context = part->position + row - part->first_row + 1;
    int64_t chunks = (n_context + COLI_KV_BLOCK - 1) / COLI_KV_BLOCK;
    int d = g->head_dim, per = g->n_q_heads / g->n_kv_heads;
    float *scores = b->scores + (int64_t)c->tid * per * b->score_stride;
    float max[64], sum[64], *part_o = (float *)c->scratch;
    if (!keeps_kv(seq, l))
        return;
    for (int h = 0; h < per; h++)
        max[h] = -INFINITY, sum[h] = 0.0f;
    for (int64_t ch = 0; ch < chunks; ch++) {
        int n = chunk_length(n_context, ch);
        const void *keys = kv_head(g, seq->k_blocks, seq->max_blocks, l->state_index, ch, kv);
        for (int h = 0; h < per; h++) {
            float *s = scores + h * b->score_stride + ch * COLI_KV_BLOCK;
            k->attn_scores[g->kv_f16](row_of(b->q, g->n_q_heads * d, row) + (kv * per + h) * d, keys, n, d,
                                      g->attn_scale, s);
            max[h] = max_of(s, n, max[h]);
        }
    }
    for (int h = 0; h < per; h++)
        memset(row_of(b->o, b->mix_pad, row) + (kv * per + h) * d, 0, (size_t)d * 4);
    for (int64_t ch = 0; ch < chunks; ch++) {
        int n = chunk_length(n_context, ch);
        const void *values = kv_head(g, seq->v_blocks, seq->max_blocks, l->state_index, ch, kv);
        for (int h = 0; h < per; h++) {
            float *s = scores + h * b->score_stride + ch * COLI_KV_BLOCK;
            sum[h] = sum[h] + k->attn_values[g->kv_f16](s, values, n, d, max[h], part_o);
            k->add(row_of(b->o, b->mix_pad, row) + (kv * per + h) * d, part_o, d);
        }
    }
    for (int h = 0; h < per; h++) {
        int head = kv * per + h;
        float *o = row_of(b->o, b->mix_pad, row) + head * d;
        for (int i = 0; i < d; i++)
            o[i] = o[i] / sum[h];
        k->mul_sigmoid(o, row_of(b->proj, b->proj_pad, row) + ((int64_t)2 * head + 1) * d, d);
        quantize_head(c, l, row, head, d);
    }
}

/* One row over many chunks: chunks are shared out instead of heads. Scores and maxima first ... */
static void attention_scores_chunk(ctx *c, const coli_layer *l, int kv, int64_t ch, int64_t n_context)
{
    const coli_geometry *g = &c->net->g;
    coli_buffers *b = c->b;
    coli_seq *seq = c->r->batch.parts[0].seq;
    int d = g->head_dim, per = g->n_q_heads / g->n_kv_heads, n = chunk_length(n_context, ch);
    float *max = b->thread_max + (int64_t)c->tid * b->heads_pad;
    const void *keys = kv_head(g, seq->k_blocks, seq->max_blocks, l->state_index, ch, kv);
    for (int head = kv * per; head < (kv + 1) * per; head++) {
        float *s = b->scores + head * b->score_stride + ch * COLI_KV_BLOCK;
        c->k->attn_scores[g->kv_f16](b->q + head * d, keys, n, d, g->attn_scale, s);
        max[head] = max_of(s, n, max[head]);
    }
}

/* ... then each chunk's part of o and l under the maximum over all chunks ... */
static void attention_values_chunk(ctx *c, const coli_layer *l, int kv, int64_t ch, int64_t n_context)
{
    const coli_geometry *g = &c->net->g;
    coli_buffers *b = c->b;
    coli_seq *seq = c->r->batch.parts[0].seq;
    int d = g->head_dim, per = g->n_q_heads / g->n_kv_heads, n = chunk_length(n_context, ch);
    const void *values = kv_head(g, seq->v_blocks, seq->max_blocks, l->state_index, ch, kv);
    for (int head = kv * per; head < (kv + 1) * per; head++) {
        float *partial = b->partial + (head * (b->score_stride / COLI_KV_BLOCK) + ch) * (d + 1);
        float max = -INFINITY;
        for (int t = 0; t < c->r->team->n_threads; t++) /* parked ones too: theirs stay -INFINITY */
            max = MAX(max, b->thread_max[(int64_t)t * b->heads_pad + head]);
        partial[d] = c->k->attn_values[g->kv_f16](b->scores + head * b->score_stride + ch * COLI_KV_BLOCK, values, n, d,
                                                  max, partial);
    }
}

/* ... then the sums over chunks, ascending. */
static void attention_finish(ctx *c, const coli_layer *l, int head, int64_t n_context)
{
    const coli_geometry *g = &c->net->g;
    coli_buffers *b = c->b;
    int d = g->head_dim;
    int64_t chunks = (n_context + COLI_KV_BLOCK - 1) / COLI_KV_BLOCK;
    const float *first = b->partial + head * (b->score_stride / COLI_KV_BLOCK) * (d + 1);
    float *o = b->o + head * d, sum = 0.0f;
    memset(o, 0, (size_t)d * 4);
    for (int64_t i = 0; i < chunks; i++) {
        sum = sum + first[i * (d + 1) + d];
        c->k->add(o, first + i * (d + 1), d);
    }
    for (int i = 0; i < d; i++)
        o[i] = o[i] / sum;
    c->k->mul_sigmoid(o, b->proj + ((int64_t)2 * head + 1) * d, d);
    quantize_head(c, l, 0, head, d);
}

/* Behind the last barrier nobody reads them any more. Parked threads do not come by: rank 0 clears theirs. */
static void reset_thread_max(ctx *c)
{
    coli_team *team = c->r->team;
    for (int t = 0; t < team->n_threads; t++)
        if (t == c->tid || (c->rank == 0 && team->shares[t].rank < 0))
            for (int head = 0; head < c->net->g.n_q_heads; head++)
                c->b->thread_max[(int64_t)t * c->b->heads_pad + head] = -INFINITY;
}

/* From this many positions a lone row is worth splitting by chunks (three barriers instead of one). */
#define SPLIT_CONTEXT 256

static void attention_core(ctx *c, const coli_layer *l)
{
    const coli_geometry *g = &c->net->g;
    const coli_batch *batch = &c->r->batch;
    int heads = g->n_q_heads + g->n_kv_heads, n_kv = g->n_kv_heads;
    FOR_ITEMS(c, batch->n_rows * heads, item)
        attention_prepare(c, l, item / heads, item % heads);
    barrier(c);
    int64_t n_context = batch->parts[0].position + 1;
    if (batch->n_rows > 1 || n_context < SPLIT_CONTEXT || c->n_threads == 1 || !keeps_kv(batch->parts[0].seq, l)) {
        FOR_ITEMS(c, batch->n_rows * n_kv, item)
            attention_whole(c, l, item / n_kv, item % n_kv);
        barrier(c);
        return;
    }
    int chunks = (int)((n_context + COLI_KV_BLOCK - 1) / COLI_KV_BLOCK);
    reset_thread_max(c);
    FOR_ITEMS(c, chunks * n_kv, item)
        attention_scores_chunk(c, l, item % n_kv, item / n_kv, n_context);
    barrier(c);
    FOR_ITEMS(c, chunks * n_kv, item)
        attention_values_chunk(c, l, item % n_kv, item / n_kv, n_context);
    barrier(c);
    FOR_ITEMS(c, g->n_q_heads, item)
        attention_finish(c, l, item, n_context);
    barrier(c);
}

/* ---- MIX_OUT -------------------------------------------------------------------------------------------- */

/* is_quantised : the heads have quantised o in this run. */
static void mix_out(ctx *c, const coli_layer *l, int is_quantised)
{
    coli_buffers *b = c->b;
    int n_rows = c->r->batch.n_rows;
    if (is_r16(&l->out) && !is_quantised) {
        /* by group where there is one row, else by row: the same values either way */
        if (n_rows == 1) {
            FOR_ITEMS(c, l->out.n_groups, item)
                c->k->quantize_groups(b->o, l->out.cols, &b->acts_o, 0, item, item + 1);
        } else {
            FOR_ITEMS(c, n_rows, row)
                c->k->quantize(row_of(b->o, b->mix_pad, row), l->out.cols, &b->acts_o, row);
        }
        barrier(c);
    }
    matmul(c, &l->out, &b->acts_o, b->o, b->mix_pad, n_rows, b->y, b->hidden_pad);
}

/* ---- NORM2: residual, norm, router ------------------------------------------------------------------------ */

static void norm2_row(coli_runner *r, int row, const coli_layer *l)
{
    r->k->add(row_of(r->b.x, r->b.hidden_pad, row), row_of(r->b.y, r->b.hidden_pad, row), r->net->g.hidden_size);
    norm_rows(r, row, l->norm2);
}

static void choose_experts(coli_runner *r, int row, const coli_layer *l)
{
    (void)l;
    const coli_geometry *g = &r->net->g;
    coli_buffers *b = &r->b;
    float *gate = b->shared_gate + row;
    r->k->router(b->router + (int64_t)row * g->n_experts, g->n_experts, g->top_k, b->top_idx + row * g->top_k,
                 b->top_w + row * g->top_k);
    r->k->sigmoid(gate, gate, 1);
    memset(b->external + row * g->top_k, 0, (size_t)g->top_k);
}

/* ---- MoE --------------------------------------------------------------------------------------------------- */

/* Order the ranks that the CPU computes by expert, so that each expert is read once. With one row the
 * slot of a rank is its rank. External ranks get the slots behind. */
static void group_by_expert(void *arg)
{
    coli_runner *r = arg;
    const coli_geometry *g = &r->net->g;
    coli_buffers *b = &r->b;
    int n = r->batch.n_rows * g->top_k, n_rows = r->batch.n_rows, slot = 0;
    b->n_active = 0;
    memset(b->expert_first, 0, (size_t)(g->n_experts + 1) * sizeof *b->expert_first);
    for (int i = 0; i < n; i++)
        if (!b->external[i])
            b->expert_first[b->top_idx[i]]++;
    for (int e = 0; e < g->n_experts; e++) {
        int count = b->expert_first[e];
        b->expert_first[e] = slot;
        if (count)
            b->active[b->n_active++] = e;
        slot += count;
    }
    b->n_slots = slot;
    /* expert_first[e] moves to the end of e while filling; afterwards it is the next expert's first */
    for (int row = 0; row < n_rows; row++)
        for (int j = 0; j < g->top_k; j++) {
            int i = row * g->top_k + j;
            int s = b->external[i] ? slot++ : b->expert_first[b->top_idx[i]]++;
            b->slot_of[i] = s;
            b->slot_row[s] = row;
        }
    for (int e = g->n_experts; e > 0; e--)
        b->expert_first[e] = b->expert_first[e - 1];
    b->expert_first[0] = 0;
    if (n_rows == 1 && is_r16(&r->net->layers[0].shared.gate)) {
        _Atomic int32_t *left = (_Atomic int32_t *)b->h_left;
        int groups = b->moe_pad / COLI_GROUP, blocks = (g->moe_dim + 15) / 16;
        for (int s = 0; s < b->n_slots; s++)
            for (int q = 0; q < groups; q++)
                atomic_store_explicit(&left[s * groups + q], MIN(8, blocks - q * 8), memory_order_relaxed);
        groups = b->shared_pad / COLI_GROUP;
        blocks = (g->shared_dim + 15) / 16;
        for (int q = 0; q < groups; q++)
            atomic_store_explicit(&left[g->top_k * (b->moe_pad / COLI_GROUP) + q], MIN(8, blocks - q * 8),
                                  memory_order_relaxed);
    }
}

/* One expert, or the shared one, of a lone row. */
typedef struct ffn {
    const coli_matrix *gate, *up, *down;
    int64_t offset;      /* of this expert's slab */
    float *h, *y;
    coli_acts *acts;     /* of h ... */
    int token, blocks;   /* ... and its number there; row blocks of gate */
    int dim;             /* values of h */
    _Atomic int32_t *left;
} ffn;

static int list_ffns(ctx *c, const coli_layer *l, ffn *list)
{
    const coli_geometry *g = &c->net->g;
    coli_buffers *b = c->b;
    _Atomic int32_t *left = (_Atomic int32_t *)b->h_left;
    int n = 0;
    for (int i = 0; i < b->n_active; i++) {
        int slot = b->expert_first[b->active[i]];
        list[n++] = (ffn){&l->experts.gate, &l->experts.up, &l->experts.down, b->active[i] * l->experts.stride_bytes,
                          row_of(b->h, b->moe_pad, slot), row_of(b->expert_y, b->hidden_pad, slot), &b->acts_h,
                          slot, l->experts.gate.n_blocks, g->moe_dim,
                          left + slot * (b->moe_pad / COLI_GROUP)};
    }
    if (!c->r->shared_external)
        list[n++] = (ffn){&l->shared.gate, &l->shared.up, &l->shared.down, 0, b->shared_h, b->shared_y, &b->acts_s,
                          0, l->shared.gate.n_blocks, g->shared_dim,
                          left + g->top_k * (b->moe_pad / COLI_GROUP)};
    return n;
}

/* Row blocks p and up to one more of gate and up: four streams. Then silu(gate) * up, and the thread
 * that finishes a group of 128 of h quantises it. */
static void ffn_gate_up(ctx *c, const ffn *f, int first, int second)
{
    float out[4][COLI_BLOCK_ROWS];
    int pairs = second >= 0 ? 2 : 1, which[2] = {first, second};
    const uint8_t *blocks[4];
    for (int i = 0; i < pairs; i++) {
        blocks[i] = block(f->gate, which[i]) + f->offset;
        blocks[pairs + i] = block(f->up, which[i]) + f->offset;
    }
    float *y[4] = {out[0], out[1], out[2], out[3]};
    c->k->gemv[f->gate->format](blocks, 2 * pairs, f->gate->n_groups, &c->b->acts, 0, y);
    c->bytes += 2 * pairs * f->gate->block_bytes;
    for (int i = 0; i < pairs; i++) {
        int r0 = which[i] * COLI_BLOCK_ROWS, n = MIN(COLI_BLOCK_ROWS, f->dim - r0), group = which[i] / 8;
        c->k->silu_mul(out[i], out[pairs + i], f->h + r0, n);
        if (atomic_fetch_sub_explicit(&f->left[group], 1, memory_order_acq_rel) == 1)
            c->k->quantize_groups(f->h, f->dim, f->acts, f->token, group, group + 1);
    }
}

/* Steps of thread `who` over its contiguous share of all (gate, up) pairs; calls back by claim. */
static void gate_up_share(ctx *c, const ffn *list, int n, int total, int who)
{
    int begin = coli_share_begin(total, who, c->n_threads), end = coli_share_begin(total, who + 1, c->n_threads);
    int steps = 0, at = 0;
    for (int i = 0; i < n; at += list[i++].blocks) {
        int a = MAX(begin, at), z = MIN(end, at + list[i].blocks);
        steps += z > a ? (z - a + 1) / 2 : 0;
    }
    int j;
    while ((j = coli_claim(c->r->team, who, c->phase, steps)) >= 0) {
        at = 0;
        for (int i = 0; i < n; at += list[i++].blocks) {
            int a = MAX(begin, at), z = MIN(end, at + list[i].blocks), half = z > a ? (z - a + 1) / 2 : 0;
            if (j >= half) {
                j -= half;
                continue;
            }
            ffn_gate_up(c, &list[i], a - at + j, a + half + j < z ? a - at + half + j : -1);
            break;
        }
    }
}

/* Output rows of every expert: a thread's share of one expert is four continuous streams. */
static void down_share(ctx *c, const ffn *list, int n, int who)
{
    int n_blocks = list[0].down->n_blocks;
    int b0 = coli_share_begin(n_blocks, who, c->n_threads);
    int share = coli_share_begin(n_blocks, who + 1, c->n_threads) - b0;
    int steps = (share + COLI_STREAMS - 1) / COLI_STREAMS, got;
    while ((got = coli_claim(c->r->team, who, c->phase, n * steps)) >= 0) {
        const ffn *f = &list[got / steps];
        const uint8_t *blocks[COLI_STREAMS];
        float *y[COLI_STREAMS];
        int j = got % steps, streams = 0;
        for (int s = 0; s < COLI_STREAMS && s * steps + j < share; s++, streams++) {
            int at = b0 + s * steps + j;
            blocks[s] = block(f->down, at) + f->offset;
            y[s] = f->y + (int64_t)at * COLI_BLOCK_ROWS;
        }
        c->k->gemv[f->down->format](blocks, streams, f->down->n_groups, f->acts, f->token, y);
        c->bytes += streams * f->down->block_bytes;
    }
}

static void moe_one_row(ctx *c, const coli_layer *l)
{
    ffn list[65];
    int n = list_ffns(c, l, list), total = 0;
    for (int i = 0; i < n; i++)
        total += list[i].blocks;
    c->phase++;
    for (int v = 0; v < c->n_threads; v++)
        gate_up_share(c, list, n, total, (c->rank + v) % c->n_threads);
    if (n) {
        coli_matrix down = *list[0].down;
        down.data += list[0].offset;
        hint_matrix(c, &down);
    }
    barrier(c);
    c->phase++;
    for (int v = 0; n && v < c->n_threads; v++)
        down_share(c, list, n, (c->rank + v) % c->n_threads);
    c->hint.left = 0;
    barrier(c);
}

/* gate and up of 128 values of h for the tokens of one expert (rows: their numbers, NULL: in order),
 * written and quantised at slots first, first + 1, ... */
static void ffn_group(ctx *c, const coli_slabs *w, int64_t offset, int dim, int group, const int32_t *rows, int n_tokens,
                      float *h, int64_t h_stride, coli_acts *acts, int first)
{
    const coli_kernels *k = c->k;
    coli_buffers *b = c->b;
    int r0 = group * COLI_GROUP, r1 = MIN(r0 + COLI_GROUP, dim);
    if (!is_r16(&w->gate)) {
        int f = w->gate.format - COLI_F32;
        float *up = (float *)c->scratch;
        for (int t = 0; t < n_tokens; t++) {
            const float *x = row_of(b->xn, b->hidden_pad, rows ? rows[t] : t);
            float *out = h + (first + t) * h_stride;
            k->dense[f](w->gate.data + offset, w->gate.block_bytes, w->gate.cols, r0, r1, x, 0, 1, out, 0);
            k->dense[f](w->up.data + offset, w->up.block_bytes, w->up.cols, r0, r1, x, 0, 1, up, 0);
            k->silu_mul(out + r0, up + r0, out + r0, r1 - r0);
        }
        c->bytes += 2 * (r1 - r0) * w->gate.block_bytes;
        return;
    }
    /* The gate goes where h will be and up into scratch; tokens in stretches that keep both in cache. */
    enum { STRETCH = 128 };
    int blocks0 = r0 / COLI_BLOCK_ROWS, n_blocks = MIN(8, w->gate.n_blocks - blocks0);
    float *up = (float *)(c->scratch + coli_gemm_scratch_bytes(w->gate.n_groups));
    for (int t0 = 0; t0 < n_tokens; t0 += STRETCH) {
        int nt = MIN(STRETCH, n_tokens - t0);
        coli_acts in = b->acts;
        const int32_t *list = rows ? rows + t0 : NULL;
        if (!rows) {
            in.q += (int64_t)t0 * COLI_GROUP;
            in.scale += t0;
            in.sum += t0;
        }
        for (int q = 0; q < n_blocks; q += COLI_STREAMS) {
            const uint8_t *gb[COLI_STREAMS], *ub[COLI_STREAMS];
            float *gy[COLI_STREAMS], *uy[COLI_STREAMS];
            int n = MIN(COLI_STREAMS, n_blocks - q);
            for (int s = 0; s < n; s++) {
                gb[s] = block(&w->gate, blocks0 + q + s) + offset;
                ub[s] = block(&w->up, blocks0 + q + s) + offset;
                gy[s] = h + (first + t0) * h_stride + r0 + (q + s) * COLI_BLOCK_ROWS;
                uy[s] = up + (q + s) * COLI_BLOCK_ROWS;
            }
            k->gemm[w->gate.format](gb, n, w->gate.n_groups, &in, list, nt, gy, h_stride, c->scratch);
            k->gemm[w->up.format](ub, n, w->up.n_groups, &in, list, nt, uy, COLI_GROUP, c->scratch);
        }
        for (int t = 0; t < nt; t++) {
            float *out = h + (first + t0 + t) * h_stride;
            k->silu_mul(out + r0, up + (int64_t)t * COLI_GROUP, out + r0, r1 - r0);
            k->quantize_groups(out, dim, acts, first + t0 + t, group, group + 1);
        }
    }
    c->bytes += 2 * n_blocks * w->gate.block_bytes;
}

static void ffn_down(ctx *c, const coli_slabs *w, int64_t offset, int item, const float *h, int64_t h_stride,
                     const coli_acts *acts, int first, int n_tokens, float *y)
{
    coli_buffers *b = c->b;
    const coli_matrix *m = &w->down;
    if (!is_r16(m)) {
        int r0 = item * 64, r1 = MIN(r0 + 64, m->rows);
        c->k->dense[m->format - COLI_F32](m->data + offset, m->block_bytes, m->cols, r0, r1, h + first * h_stride,
                                          h_stride, n_tokens, y + (int64_t)first * b->hidden_pad, b->hidden_pad);
        c->bytes += (r1 - r0) * m->block_bytes;
        return;
    }
    const uint8_t *blocks[COLI_STREAMS];
    float *out[COLI_STREAMS];
    int b0 = item * COLI_STREAMS, n = MIN(COLI_STREAMS, m->n_blocks - b0);
    coli_acts in = *acts;
    in.q += (int64_t)first * COLI_GROUP;
    in.scale += first;
    in.sum += first;
    for (int s = 0; s < n; s++) {
        blocks[s] = block(m, b0 + s) + offset;
        out[s] = y + (int64_t)first * b->hidden_pad + (b0 + s) * COLI_BLOCK_ROWS;
    }
    c->k->gemm[m->format](blocks, n, m->n_groups, &in, NULL, n_tokens, out, b->hidden_pad, c->scratch);
    c->bytes += n * m->block_bytes;
}

static void moe_rows(ctx *c, const coli_layer *l)
{
    const coli_geometry *g = &c->net->g;
    coli_buffers *b = c->b;
    int n_rows = c->r->batch.n_rows, shared = c->r->shared_external ? 0 : 1;
    int groups = (g->moe_dim + COLI_GROUP - 1) / COLI_GROUP, shared_groups = (g->shared_dim + COLI_GROUP - 1) / COLI_GROUP;
    int downs = (g->hidden_size + 63) / 64;
    /* the shared expert first: its items are the longest */
    FOR_ITEMS(c, shared * shared_groups + b->n_active * groups, item) {
        if (item < shared * shared_groups)
            ffn_group(c, &l->shared, 0, g->shared_dim, item, NULL, n_rows, b->shared_h, b->shared_pad, &b->acts_s, 0);
        else {
            int i = item - shared * shared_groups, e = b->active[i / groups], first = b->expert_first[e];
            ffn_group(c, &l->experts, e * l->experts.stride_bytes, g->moe_dim, i % groups, b->slot_row + first,
                      b->expert_first[e + 1] - first, b->h, b->moe_pad, &b->acts_h, first);
        }
    }
    barrier(c);
    FOR_ITEMS(c, (shared + b->n_active) * downs, item) {
        if (item < shared * downs)
            ffn_down(c, &l->shared, 0, item, b->shared_h, b->shared_pad, &b->acts_s, 0, n_rows, b->shared_y);
        else {
            int i = item - shared * downs, e = b->active[i / downs], first = b->expert_first[e];
            ffn_down(c, &l->experts, e * l->experts.stride_bytes, i % downs, b->h, b->moe_pad, &b->acts_h, first,
                     b->expert_first[e + 1] - first, b->expert_y);
        }
    }
    barrier(c);
}

static void take_row(coli_runner *r, const coli_given *given, int row)
{
    float *xn = row_of(r->b.xn, r->b.hidden_pad, row);
    memcpy(xn, given->xn + row * given->xn_stride, (size_t)r->net->g.hidden_size * sizeof *xn);
    r->k->quantize(xn, r->net->g.hidden_size, &r->b.acts, row);
}

/* is_grouped : NORM2 of this run has ordered the ranks by expert. */
static void moe(ctx *c, const coli_layer *l, int is_grouped)
{
    if (c->given) { /* whose ranks are in order already, and a lone row is there too */
        if (c->r->batch.n_rows > 1) {
            FOR_ITEMS(c, c->r->batch.n_rows, row)
                take_row(c->r, c->given, row);
            barrier(c);
        }
    } else if (!is_grouped) /* somebody may have marked ranks as external in between */
        coli_barrier(c->r->team, c->tid, NULL, group_by_expert, c->r);
    if (c->r->batch.n_rows == 1 && is_r16(&l->shared.gate) && is_r16(&l->experts.gate))
        moe_one_row(c, l);
    else
        moe_rows(c, l);
}

/* Columns [c0, c1) of one row: experts in rank order, the shared expert, the residual. */
static void combine(ctx *c, int row, int c0, int c1)
{
    const coli_geometry *g = &c->net->g;
    const coli_kernels *k = c->k;
    coli_buffers *b = c->b;
    float *out = (float *)c->scratch;
    const float *w = b->top_w + row * g->top_k;
    const int32_t *slot = b->slot_of + row * g->top_k;
    k->axpy_set(w[0], row_of(b->expert_y, b->hidden_pad, slot[0]) + c0, out, c1 - c0);
    for (int j = 1; j < g->top_k; j++)
        k->axpy(w[j], row_of(b->expert_y, b->hidden_pad, slot[j]) + c0, out, c1 - c0);
    k->axpy(b->shared_gate[row], row_of(b->shared_y, b->hidden_pad, row) + c0, out, c1 - c0);
    k->add(row_of(b->x, b->hidden_pad, row) + c0, out, c1 - c0);
}

#define COMBINE_COLUMNS 512

/* ---- the sequence of operations -------------------------------------------------------------------------- */

static void norm_final_row(coli_runner *r, int i, const coli_layer *l)
{
    (void)l;
    const coli_geometry *g = &r->net->g;
    coli_buffers *b = &r->b;
    float *xn = row_of(b->xn, b->hidden_pad, i);
    r->k->rmsnorm(row_of(b->x, b->hidden_pad, r->batch.logit_rows[i]), r->net->norm, g->hidden_size, g->eps, xn);
    r->k->quantize(xn, g->hidden_size, &b->acts, i);
}

static void check_finite(ctx *c)
{
    const coli_geometry *g = &c->net->g;
    enum { SPAN = 16384 };
    int spans = (g->vocab_size + SPAN - 1) / SPAN;
    FOR_ITEMS(c, c->r->batch.n_logits * spans, item) {
        const float *y = c->r->batch.logits + (int64_t)(item / spans) * c->b->vocab_pad;
        int i0 = item % spans * SPAN, i1 = MIN(i0 + SPAN, g->vocab_size);
        uint32_t worst = 0;
        for (int i = i0; i < i1; i++) {
            uint32_t u;
            memcpy(&u, y + i, 4);
            u &= 0x7fffffff;
            worst = u > worst ? u : worst;
        }
        if (worst >= 0x7f800000)
            atomic_store(&c->r->nonfinite, 1);
    }
}

static void run_op(ctx *c, int number)
{
    coli_runner *r = c->r;
    coli_buffers *b = c->b;
    const coli_geometry *g = &c->net->g;
    int layer = number / COLI_N_OPS, op = number % COLI_N_OPS, n_rows = r->batch.n_rows;
    if (layer >= g->n_layers) {
        if (op == COLI_FINAL) {
            hint_matrix(c, &c->net->head);
            barrier_rows(c, norm_final_row, r->batch.n_logits, NULL, NULL);
        } else {
            matmul(c, &c->net->head, &b->acts, b->xn, b->hidden_pad, r->batch.n_logits, r->batch.logits, b->vocab_pad);
            barrier(c);
            check_finite(c);
        }
        return;
    }
    const coli_layer *l = &c->net->layers[layer];
    switch (op) {
    case COLI_NORM1:
        hint_matrix(c, &l->in);
        barrier_rows(c, norm1_row, n_rows, l, NULL);
        break;
    case COLI_MIX_IN:
        matmul(c, &l->in, &b->acts, b->xn, b->hidden_pad, n_rows, b->proj, b->proj_pad);
        hint_matrix(c, &l->out);
        barrier(c);
        break;
    case COLI_MIX_CORE:
        if (l->is_attention)
            attention_core(c, l);
        else
            deltanet_core(c, l);
        break;
    case COLI_MIX_OUT:
        mix_out(c, l, number > c->first && quantises_heads(l, l->is_attention ? g->head_dim : g->dn_v_dim));
        break;
    case COLI_NORM2:
        c->hint.left = 0;
        barrier_rows(c, norm2_row, n_rows, l, NULL);
        matmul(c, &l->router, NULL, b->xn, b->hidden_pad, n_rows, b->router, g->n_experts);
        matmul(c, &l->shared_gate, NULL, b->xn, b->hidden_pad, n_rows, b->shared_gate, 1);
        barrier_rows(c, choose_experts, n_rows, l, number + 1 < c->last ? group_by_expert : NULL);
        break;
    case COLI_MOE:
        moe(c, l, number > c->first);
        break;
    case COLI_COMBINE: {
        int pieces = (g->hidden_size + COMBINE_COLUMNS - 1) / COMBINE_COLUMNS;
        FOR_ITEMS(c, n_rows * pieces, item) {
            int c0 = item % pieces * COMBINE_COLUMNS;
            combine(c, item / pieces, c0, MIN(c0 + COMBINE_COLUMNS, g->hidden_size));
        }
        break;
    }
    }
}

void coli_embed(coli_runner *r)
{
    const coli_matrix *m = &r->net->embed;
    for (int row = 0; row < r->batch.n_rows; row++)
        r->k->widen[m->format - COLI_F32](m->data + (int64_t)r->batch.ids[row] * m->block_bytes,
                                          row_of(r->b.x, r->b.hidden_pad, row), m->cols);
}

static void run_region(coli_runner *r, int first, int last, const coli_given *given)
{
    uint32_t phase = r->team->phase;
    coli_team_begin(r->team);
    r->team->judges = r->batch.n_rows == 1; /* with more rows an item may well be long */
#ifdef _OPENMP
#pragma omp parallel num_threads(r->team->n_threads)
#endif
    {
        ctx c = {.r = r, .k = r->k, .net = r->net, .b = &r->b, .tid = omp_get_thread_num(),
                 .n_threads = r->team->n_active, .first = first, .last = last, .given = given, .phase = phase};
        c.rank = r->team->shares[c.tid].rank;
        c.scratch = r->b.scratch + c.tid * r->b.scratch_bytes;
        if (c.rank >= 0) /* a parked thread sits this run out */
            for (int number = first; number < last; number++)
                run_op(&c, number);
        r->weight_bytes[c.tid * 16] += c.bytes;
        if (c.tid == 0)
            r->team->phase = c.phase;
    }
}

void coli_run_ops(coli_runner *r, int first, int last) { run_region(r, first, last, NULL); }

int coli_run_moe(coli_runner *r, int layer, const coli_given *given)
{
    const coli_geometry *g = &r->net->g;
    size_t n = (size_t)r->batch.n_rows * g->top_k;
    for (size_t i = 0; i < n; i++)
        if ((uint32_t)given->top_idx[i] >= (uint32_t)g->n_experts)
            return 1;
    memcpy(r->b.top_idx, given->top_idx, n * sizeof *given->top_idx);
    memmove(r->b.external, given->external, n); /* the caller may have filled the buffer itself */
    if (r->batch.n_rows == 1)
        take_row(r, given, 0);
    group_by_expert(r);
    int number = layer * COLI_N_OPS + COLI_MOE;
    run_region(r, number, number + 1, given);
    return 0;
}

/* ---- the ruler --------------------------------------------------------------------------------------------- */

#define READ_PIECE 32768 /* bytes a stream gives at a time: about an int8 block of 2,048 columns */

void coli_read_buffers(coli_runner *r, const uint8_t *const *data, const int64_t *n_bytes, int n)
{
    uint32_t phase = r->team->phase;
    static _Atomic uint64_t sink; /* so that no compiler drops the reads */
    coli_team_begin(r->team);
#ifdef _OPENMP
#pragma omp parallel num_threads(r->team->n_threads)
#endif
    {
        int tid = omp_get_thread_num(), n_threads = r->team->n_active, rank = r->team->shares[tid].rank;
        uint32_t mine = phase;
        uint64_t x = 0;
        for (int i = 0; rank >= 0 && i < n; i++) {
            int pieces = (int)((n_bytes[i] + READ_PIECE - 1) / READ_PIECE);
            mine++;
            for (int v = 0; v < n_threads; v++) {
                int who = (rank + v) % n_threads, first = coli_share_begin(pieces, who, n_threads);
                int share = coli_share_begin(pieces, who + 1, n_threads) - first, steps = (share + 3) / 4, j;
                while ((j = coli_claim(r->team, who, mine, steps)) >= 0) {
                    const uint8_t *streams[4];
                    int k = 0, last = 0;
                    for (int s = 0; s < 4 && s * steps + j < share; s++) {
                        int64_t at = (int64_t)(first + s * steps + j) * READ_PIECE;
                        if (at + READ_PIECE <= n_bytes[i])
                            streams[k++] = data[i] + at;
                        else
                            last = (int)((n_bytes[i] - at) / 64 * 64);
                    }
                    if (k)
                        x ^= r->read(streams, k, READ_PIECE);
                    if (last) {
                        const uint8_t *tail = data[i] + (int64_t)(pieces - 1) * READ_PIECE;
                        x ^= r->read(&tail, 1, last);
                    }
                }
            }
        }
        atomic_fetch_xor(&sink, x);
        if (tid == 0)
            r->team->phase = mine;
    }
}
