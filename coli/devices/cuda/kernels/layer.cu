/* What lies between the products of a layer: norms, convolution, DeltaNet, attention, router.
 *
 * Sums follow docs/numerics.md, section 4: features by the 32 lanes of one warp and a tree, keys of DeltaNet by chunks
 * of 16, attended positions by chunks of 64, chunks ascending.  Rows are consecutive positions of one sequence; the
 * first one's position is read from memory, so that a captured graph serves every token.
 */

/* One warp's sum over n values that all threads of the block have put into shared memory. */
DEVICE float lane_sum(const float *values, int n, int lane)
{
    float p = 0.0f;
#pragma unroll 8
    for (int i = lane; i < n; i += WARP)
        p = __fadd_rn(p, values[i]);
    return tree32(p);
}

/* x = x + y where y is given; xn = rmsnorm(x) * w; xn quantised where acts are given.  A block takes one row.
 * shared: n + 1 floats. */
extern "C" __global__ void __launch_bounds__(512)
    add_norm(float *x, const float *y, const float *w, int n, float eps, float *xn, Acts a)
{
    extern __shared__ float squares[];
    float *row = x + (i64)blockIdx.x * n, *out = xn + (i64)blockIdx.x * n;
    const float *add = y ? y + (i64)blockIdx.x * n : y;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        float v = row[i];
        if (add)
            row[i] = v = __fadd_rn(v, add[i]);
        squares[i] = __fmul_rn(v, v);
    }
    __syncthreads();
    int lane = threadIdx.x % WARP;
    if (threadIdx.x < WARP) {
        float ss = lane_sum(squares, n, lane);
        if (lane == 0)
            squares[n] = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(ss, (float)n), eps)));
    }
    __syncthreads();
    float r = squares[n];
    for (int g = threadIdx.x / WARP; g * GROUP < n; g += blockDim.x / WARP) {
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        int k = g * GROUP + 4 * lane;
#define NORM_ONE(FIELD, I)                                                                                             \
    if (k + I < n)                                                                                                     \
        out[k + I] = v.FIELD = __fmul_rn(__fmul_rn(row[k + I], r), w[k + I]);
        NORM_ONE(x, 0)
        NORM_ONE(y, 1)
        NORM_ONE(z, 2)
        NORM_ONE(w, 3)
#undef NORM_ONE
        if (a.q) {
            float scale;
            int sum;
            u32 q = quantize_group(v, &scale, &sum);
            store_group(a, blockIdx.x, g, lane, q, scale, sum);
        }
    }
}

/* ---- DeltaNet ------------------------------------------------------------------------------------------------- */

/* Convolution and silu of one head's channels over n_rows positions, l2norm of q and k heads, and the ring of raw rows.
 * grid: q heads, k heads, v heads; a thread a channel.  ring (taps, channels): row p % taps is position p. */
extern "C" __global__ void __launch_bounds__(1024)
    conv_heads(const float *proj, i64 proj_stride, const float *w, int taps, int channels, int n_qk, int dk, int dv,
               float q_scale, float *ring, const i64 *first_position, int n_rows, float *out)
{
    extern __shared__ float squares[];
    int piece = blockIdx.x, is_v = piece >= 2 * n_qk, width = is_v ? dv : dk, i = threadIdx.x;
    int c = is_v ? 2 * n_qk * dk + (piece - 2 * n_qk) * dv + i : piece * dk + i;
    i64 position = *first_position;
    for (int t = 0; t < n_rows; t++, position++) {
        float v = 0.0f;
        if (i < width) {
            float acc = 0.0f;
            for (int j = 0; j < taps; j++) { /* tap j meets the row of taps-1-j positions ago */
                int back = taps - 1 - j;
                i64 p = position - back;
                float x =
                    back <= t ? proj[(t - back) * proj_stride + c] : ring[((p % taps + taps) % taps) * channels + c];
                acc = __fadd_rn(acc, __fmul_rn(w[j * channels + c], x));
            }
            v = silu_(acc);
            squares[i] = __fmul_rn(v, v);
        }
        if (!is_v) {
            __syncthreads();
            if (i < WARP) {
                float r = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(lane_sum(squares, width, i), 1e-6f)));
                if (i == 0)
                    squares[width] = r;
            }
            __syncthreads();
            v = __fmul_rn(__fmul_rn(v, squares[width]), piece < n_qk ? q_scale : 1.0f);
            __syncthreads();
        }
        if (i < width)
            out[(i64)t * channels + c] = v;
    }
    /* rows that a later call may meet; this thread alone reads and writes its channel, and it has read all it needs */
    position = *first_position;
    if (i < width)
        for (int t = n_rows > taps ? n_rows - taps : 0; t < n_rows; t++)
            ring[(position + t) % taps * channels + c] = proj[t * proj_stride + c];
}

/* The recurrence of one head and 32 value columns over n_rows positions.  grid (dv / 32, heads); a warp owns 16 keys, a
 * lane a column; the state stays in registers.  shared: warps * 32 floats. */
extern "C" __global__ void __launch_bounds__(512, 1)
    deltanet(float *state, const float *u, i64 u_stride, const float *ba, const float *exp_a_log, const float *dt_bias,
             int n_qk, int heads, int dk, int dv, int n_rows, float *o, i64 o_stride)
{
    extern __shared__ float chunk[];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    int column = blockIdx.x * WARP + lane, head = blockIdx.y, key_head = head / (heads / n_qk), key0 = warp * 16;
    bool mine = column < dv;
    float *rows = state + ((i64)head * dk + key0) * dv + column;
    float s[16];
#pragma unroll
    for (int i = 0; i < 16; i++)
        s[i] = mine && key0 + i < dk ? rows[(i64)i * dv] : 0.0f;
    for (int t = 0; t < n_rows; t++) {
        const float *q = u + t * u_stride + key_head * dk + key0;
        const float *k = u + t * u_stride + (n_qk + key_head) * dk + key0;
        float beta = sigmoid_(ba[(i64)t * 2 * heads + head]);
        float soft = softplus_(__fadd_rn(ba[(i64)t * 2 * heads + heads + head], dt_bias[head]));
        float decay = exp_(-__fmul_rn(exp_a_log[head], soft));
        float acc = 0.0f;
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (key0 + i < dk) {
                s[i] = __fmul_rn(decay, s[i]);
                acc = __fadd_rn(acc, __fmul_rn(s[i], k[i]));
            }
        chunk[warp * WARP + lane] = acc;
        __syncthreads();
        float kv = 0.0f;
        for (int c = 0; c < warps; c++)
            kv = __fadd_rn(kv, chunk[c * WARP + lane]);
        __syncthreads();
        float v = mine ? u[t * u_stride + 2 * n_qk * dk + head * dv + column] : 0.0f;
        float d = __fmul_rn(__fsub_rn(v, kv), beta);
        acc = 0.0f;
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (key0 + i < dk) {
                s[i] = __fadd_rn(s[i], __fmul_rn(k[i], d));
                acc = __fadd_rn(acc, __fmul_rn(s[i], q[i]));
            }
        chunk[warp * WARP + lane] = acc;
        __syncthreads();
        if (warp == 0 && mine) {
            float sum = 0.0f;
            for (int c = 0; c < warps; c++)
                sum = __fadd_rn(sum, chunk[c * WARP + lane]);
            o[t * o_stride + head * dv + column] = sum;
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 16; i++)
        if (mine && key0 + i < dk)
            rows[(i64)i * dv] = s[i];
}

/* o = rmsnorm(o; w) * silu(z), a head of n values a warp.  grid (heads, rows), one warp. */
extern "C" __global__ void __launch_bounds__(32)
    gated_norm(float *o, i64 o_stride, const float *z, i64 z_stride, const float *w, int n, float eps)
{
    float *row = o + blockIdx.y * o_stride + blockIdx.x * n;
    const float *gate = z + blockIdx.y * z_stride + blockIdx.x * n;
    float p = 0.0f;
    for (int i = threadIdx.x; i < n; i += WARP)
        p = __fadd_rn(p, __fmul_rn(row[i], row[i]));
    float r = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(tree32(p), (float)n), eps)));
    for (int i = threadIdx.x; i < n; i += WARP)
        row[i] = __fmul_rn(__fmul_rn(__fmul_rn(row[i], r), w[i]), silu_(gate[i]));
}

/* ---- attention ------------------------------------------------------------------------------------------------ */

#define CHUNK 64 /* positions of a K/V block, and of one sum */

template <int HALF> DEVICE float kv_load(const void *p, i64 i)
{
    return HALF ? half_to_float(((const u16 *)p)[i]) : ((const float *)p)[i];
}

template <int HALF> DEVICE void kv_store(void *p, i64 i, float v)
{
    if (HALF)
        ((u16 *)p)[i] = float_to_half(v);
    else
        ((float *)p)[i] = v;
}

/* Norm and RoPE of one head of one row; k and v go to the cache.  proj row: query and gate by head, then k, then v.
 * cos_ and sin_ (rows, half).  grid (q heads + kv heads, rows), one warp; shared: d floats.
 * blocks: one K/V block (kv heads, 64, d) each. */
template <int HALF>
DEVICE void attention_prepare(const float *proj, i64 proj_stride, const float *q_norm, const float *k_norm,
                              const float *cos_, const float *sin_, int half, int n_q, int n_kv, int d, float eps,
                              void *const *k_blocks, void *const *v_blocks, const i64 *first_position, float *q)
{
    extern __shared__ float head_row[];
    int lane = threadIdx.x, is_key = blockIdx.x >= n_q, head = is_key ? blockIdx.x - n_q : blockIdx.x;
    i64 position = *first_position + blockIdx.y;
    const float *row = proj + blockIdx.y * proj_stride;
    const float *x = is_key ? row + ((i64)2 * n_q + head) * d : row + (i64)head * 2 * d, *w = is_key ? k_norm : q_norm;
    float p = 0.0f;
    for (int i = lane; i < d; i += WARP)
        p = __fadd_rn(p, __fmul_rn(x[i], x[i]));
    float r = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(tree32(p), (float)d), eps)));
    for (int i = lane; i < d; i += WARP)
        head_row[i] = __fmul_rn(__fmul_rn(x[i], r), w[i]);
    __syncwarp();
    cos_ += (i64)blockIdx.y * half;
    sin_ += (i64)blockIdx.y * half;
    for (int i = lane; i < half; i += WARP) {
        float a = head_row[i], b = head_row[i + half];
        head_row[i] = __fsub_rn(__fmul_rn(a, cos_[i]), __fmul_rn(b, sin_[i]));
        head_row[i + half] = __fadd_rn(__fmul_rn(b, cos_[i]), __fmul_rn(a, sin_[i]));
    }
    __syncwarp();
    if (!is_key) {
        for (int i = lane; i < d; i += WARP)
            q[((i64)blockIdx.y * n_q + head) * d + i] = head_row[i];
        return;
    }
    i64 at = ((i64)head * CHUNK + position % CHUNK) * d;
    const float *v = row + ((i64)2 * n_q + n_kv + head) * d;
    for (int i = lane; i < d; i += WARP) {
        kv_store<HALF>(k_blocks[position / CHUNK], at + i, head_row[i]);
        kv_store<HALF>(v_blocks[position / CHUNK], at + i, v[i]);
    }
}

/* Scores of one chunk and one K/V head's query heads, and their maximum.  grid (chunks, kv heads, rows), 8 warps: a
 * warp takes every eighth position.  scores (rows, q heads, chunks, 64), maxima (rows, q heads, chunks). */
template <int HALF>
DEVICE void attention_scores(const float *q, void *const *k_blocks, int n_q, int n_kv, int d, float scale,
                             const i64 *first_position, int max_chunks, float *scores, float *maxima)
{
    __shared__ float warp_max_[8];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, c = blockIdx.x, kv = blockIdx.y, per = n_q / n_kv;
    i64 left = *first_position + blockIdx.z + 1 - (i64)c * CHUNK;
    if (left <= 0)
        return;
    int n = left < CHUNK ? (int)left : CHUNK;
    const void *keys = k_blocks[c];
    for (int h = 0; h < per; h++) {
        i64 head = (i64)blockIdx.z * n_q + kv * per + h;
        const float *query = q + head * d;
        float *s = scores + (head * max_chunks + c) * CHUNK, m = __uint_as_float(0xff800000u);
        for (int t = warp; t < n; t += 8) {
            float p = 0.0f;
            for (int i = lane; i < d; i += WARP)
                p = __fadd_rn(p, __fmul_rn(query[i], kv_load<HALF>(keys, ((i64)kv * CHUNK + t) * d + i)));
            p = __fmul_rn(tree32(p), scale);
            if (lane == 0)
                s[t] = p;
            m = p > m ? p : m;
        }
        if (lane == 0)
            warp_max_[warp] = m;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int i = 0; i < 8; i++)
                m = warp_max_[i] > m ? warp_max_[i] : m;
            maxima[head * max_chunks + c] = m;
        }
        __syncthreads();
    }
}

/* p = exp(s - max) of one chunk, its sum, and the sum of p * v.  grid (chunks, q heads, rows), a thread a value
 * (looped). partial (rows, q heads, chunks, d + 1): o, then l. */
template <int HALF>
DEVICE void attention_values(const float *scores, const float *maxima, void *const *v_blocks, int n_q, int n_kv, int d,
                             const i64 *first_position, int max_chunks, float *partial)
{
    __shared__ float p[CHUNK];
    int c = blockIdx.x, kv = blockIdx.y / (n_q / n_kv);
    i64 context = *first_position + blockIdx.z + 1, left = context - (i64)c * CHUNK;
    if (left <= 0)
        return;
    int n = left < CHUNK ? (int)left : CHUNK, chunks = (int)((context + CHUNK - 1) / CHUNK);
    i64 head = (i64)blockIdx.z * n_q + blockIdx.y;
    const float *s = scores + (head * max_chunks + c) * CHUNK;
    float max = __uint_as_float(0xff800000u);
    for (int i = 0; i < chunks; i++) {
        float m = maxima[head * max_chunks + i];
        max = m > max ? m : max;
    }
    for (int t = threadIdx.x; t < n; t += blockDim.x)
        p[t] = exp_(__fsub_rn(s[t], max));
    __syncthreads();
    float *out = partial + (head * max_chunks + c) * (d + 1);
    if (threadIdx.x < WARP) {
        float l = lane_sum(p, n, threadIdx.x);
        if (threadIdx.x == 0)
            out[d] = l;
    }
    const void *values = v_blocks[c];
    for (int i = threadIdx.x; i < d; i += blockDim.x) {
        float acc = 0.0f;
#pragma unroll 8
        for (int t = 0; t < n; t++)
            acc = __fadd_rn(acc, __fmul_rn(p[t], kv_load<HALF>(values, ((i64)kv * CHUNK + t) * d + i)));
        out[i] = acc;
    }
}

#define ATTENTION(HALF, NAME)                                                                                          \
    extern "C" __global__ void __launch_bounds__(32)                                                                   \
        attention_prepare_##NAME(const float *proj, i64 proj_stride, const float *q_norm, const float *k_norm,         \
                                 const float *cos_, const float *sin_, int half, int n_q, int n_kv, int d, float eps,  \
                                 void *const *k_blocks, void *const *v_blocks, const i64 *first_position, float *q)    \
    {                                                                                                                  \
        attention_prepare<HALF>(proj, proj_stride, q_norm, k_norm, cos_, sin_, half, n_q, n_kv, d, eps, k_blocks,      \
                                v_blocks, first_position, q);                                                          \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        attention_scores_##NAME(const float *q, void *const *k_blocks, int n_q, int n_kv, int d, float scale,          \
                                const i64 *first_position, int max_chunks, float *scores, float *maxima)               \
    {                                                                                                                  \
        attention_scores<HALF>(q, k_blocks, n_q, n_kv, d, scale, first_position, max_chunks, scores, maxima);          \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        attention_values_##NAME(const float *scores, const float *maxima, void *const *v_blocks, int n_q, int n_kv,    \
                                int d, const i64 *first_position, int max_chunks, float *partial)                      \
    {                                                                                                                  \
        attention_values<HALF>(scores, maxima, v_blocks, n_q, n_kv, d, first_position, max_chunks, partial);           \
    }
ATTENTION(0, f32)
ATTENTION(1, f16)

/* Chunks ascending, o / l, times the sigmoid of the gate.  grid (q heads, rows). */
extern "C" __global__ void __launch_bounds__(256)
    attention_finish(const float *partial, const float *proj, i64 proj_stride, int n_q, int d,
                     const i64 *first_position, int max_chunks, float *o, i64 o_stride)
{
    int chunks = (int)((*first_position + blockIdx.y + CHUNK) / CHUNK);
    const float *first = partial + ((i64)blockIdx.y * n_q + blockIdx.x) * max_chunks * (d + 1);
    const float *gate = proj + blockIdx.y * proj_stride + ((i64)2 * blockIdx.x + 1) * d;
    for (int i = threadIdx.x; i < d; i += blockDim.x) {
        float acc = 0.0f, l = 0.0f;
        for (int c = 0; c < chunks; c++) {
            l = __fadd_rn(l, first[(i64)c * (d + 1) + d]);
            acc = __fadd_rn(acc, first[(i64)c * (d + 1) + i]);
        }
        o[blockIdx.y * o_stride + blockIdx.x * d + i] = __fmul_rn(__fdiv_rn(acc, l), sigmoid_(gate[i]));
    }
}

/* ---- router --------------------------------------------------------------------------------------------------- */

/* The top_k <= 32 largest of n logits, lower index on ties, and their softmax; the shared expert's gate beside them.
 * grid (rows), one warp; shared: n words. */
extern "C" __global__ void __launch_bounds__(32)
    router(const float *logits, const float *gate, int n, int top_k, int *idx, float *w, float *gate_out)
{
    extern __shared__ u32 keys[];
    int lane = threadIdx.x;
    const float *row = logits + (i64)blockIdx.x * n;
    for (int i = lane; i < n; i += WARP) { /* a key orders as its logit does: -0 as +0, and never 0 itself */
        u32 bits = __float_as_uint(__fadd_rn(row[i], 0.0f));
        keys[i] = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    }
    __syncwarp();
    float mine = 0.0f, max = 0.0f;
    int chosen = 0;
    for (int j = 0; j < top_k; j++) {
        u32 best = 0;
        for (int i = lane; i < n; i += WARP)
            best = keys[i] > best ? keys[i] : best;
        best = warp_max(best);
        u32 at = 0; /* lowest index first: the largest of ~index */
        for (int i = lane; i < n; i += WARP)
            if (keys[i] == best && ~(u32)i > at)
                at = ~(u32)i;
        int found = (int)~warp_max(at);
        float logit = __uint_as_float(best & 0x80000000u ? best & 0x7fffffffu : ~best);
        if (j == 0)
            max = logit;
        if (lane == j) {
            chosen = found;
            mine = logit;
        }
        __syncwarp();
        if (lane == 0)
            keys[found] = 0;
        __syncwarp();
    }
    float p = lane < top_k ? exp_(__fsub_rn(mine, max)) : 0.0f;
    float sum = tree32(__fadd_rn(0.0f, p));
    if (lane < top_k) {
        idx[(i64)blockIdx.x * top_k + lane] = chosen;
        w[(i64)blockIdx.x * top_k + lane] = __fdiv_rn(p, sum);
    }
    if (lane == 0 && gate)
        gate_out[blockIdx.x] = sigmoid_(gate[blockIdx.x]);
}

/* x = x + (experts in rank order + shared expert).  y (rows, top_k, n); grid (n / 256, rows). */
extern "C" __global__ void __launch_bounds__(256)
    combine(float *x, const float *y, const float *w, int top_k, const float *shared_y, const float *shared_w, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    i64 row = blockIdx.y;
    const float *mine = y + row * top_k * n + i;
    float out = __fmul_rn(w[row * top_k], mine[0]);
    for (int j = 1; j < top_k; j++)
        out = __fadd_rn(out, __fmul_rn(w[row * top_k + j], mine[(i64)j * n]));
    out = __fadd_rn(out, __fmul_rn(shared_w[row], shared_y[row * n + i]));
    x[row * n + i] = __fadd_rn(x[row * n + i], out);
}
