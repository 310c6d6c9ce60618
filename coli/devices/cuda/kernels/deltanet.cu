/* DeltaNet between its projections: convolution, recurrence, gated norm.
 *
 * Rows of a batch belong to parts, consecutive positions of one sequence each.  A part's state is states[2 * part]
 * (value heads, dk, dv) and states[2 * part + 1], the ring of raw rows before the convolution (taps, channels): row
 * p % taps is position p.
 */

/* Consecutive rows of one sequence: the first of them is at `position`. */
struct Part {
    int first_row, n_rows;
    i64 position;
};

/* ---- the in-projection of one row, with b and a ---------------------------------------------------------------- */

#define GATE_ROWS 4 /* rows of the matrix of b and a in one block of `project` */

/* ba = w . x of GATE_ROWS rows by one block: rows in shared memory before it waits, x afterwards, then a warp a row. */
DEVICE void gate_rows(const u8 *w, int format, i64 row_bytes, int n_rows, int cols, const float *x, float *ba)
{
    extern __shared__ __align__(16) float staged[];
    float *here = staged;
    u8 *rows = (u8 *)(staged + (cols + 3) / 4 * 4);
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, words = row_bytes / 4 * n_rows;
#pragma unroll 4
    for (int i = threadIdx.x; i < words; i += blockDim.x)
        ((u32 *)rows)[i] = ((const u32 *)w)[i];
    wait_for_previous();
    let_next_start();
#pragma unroll 4
    for (int k = threadIdx.x; k < cols; k += blockDim.x)
        here[k] = x[k];
    __syncthreads();
    if (warp >= n_rows)
        return;
    const u8 *row = rows + warp * row_bytes;
    float p = 0.0f;
#pragma unroll 8
    for (int k = lane; k < cols; k += WARP) {
        float v = format == F32 ? widen<F32>(row, k) : format == BF16 ? widen<BF16>(row, k) : widen<F16>(row, k);
        p = __fadd_rn(p, __fmul_rn(v, here[k]));
    }
    p = tree32(p);
    if (lane == 0)
        ba[warp] = p;
}

/* proj = W x of one quantised row, and ba (n_gates) = its product with the unquantised matrix of b and a, whose blocks
 * come first, GATE_ROWS rows each.  Blocks of R16 follow.  grid (gate_blocks + blocks of rows), at least GATE_ROWS
 * warps; shared: n_groups * 16 floats, and room for GATE_ROWS rows and x where there are gates.
 *
 * ahead: so many blocks run at once, and each of the first has the weights of those `ahead` behind it brought into the
 * L2 cache while it waits itself.  Nobody starts the next kernel before all that came before this one is done. */
template <int FORMAT>
DEVICE void project(const u8 *w, i64 block_bytes, int rows, const Acts &a, float *proj, int ahead, const u8 *gates,
                    int gate_format, i64 gate_bytes, int n_gates, int gate_blocks, int cols, const float *x, float *ba)
{
    extern __shared__ __align__(16) float staged[];
    float *products = staged;
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    if (blockIdx.x < gate_blocks) {
        int first = blockIdx.x * GATE_ROWS, left = n_gates - first;
        gate_rows(gates + first * gate_bytes, gate_format, gate_bytes, left < GATE_ROWS ? left : GATE_ROWS, cols, x,
                  ba + first);
        return;
    }
    int number = blockIdx.x - gate_blocks;
    const u8 *block = w + number * block_bytes;
    float row_scale = load_row_scale<FORMAT>(block, threadIdx.x % BLOCK_ROWS);
    if (number < ahead)
        for (int later = number + ahead; later < gridDim.x - gate_blocks; later += ahead)
            for (i64 at = threadIdx.x * 128; at < block_bytes; at += blockDim.x * 128)
                fetch_line(w + later * block_bytes + at);
    block_products<FORMAT, 1, 1>(block, a, 0, 1, warp, warps, lane, products);
    wait_for_previous(); /* where a warp had no group */
    let_next_start();
    __syncthreads();
    int r = number * BLOCK_ROWS + threadIdx.x;
    if (threadIdx.x < BLOCK_ROWS && r < rows)
        proj[r] = add_groups<FORMAT>(row_scale, products, a.n_groups, threadIdx.x);
}

#define PROJECT(FORMAT, NAME)                                                                                          \
    extern "C" __global__ void __launch_bounds__(512, 3)                                                               \
        project_##NAME(const u8 *w, i64 block_bytes, int rows, Acts a, float *proj, int ahead, const u8 *gates,        \
                       int gate_format, i64 gate_bytes, int n_gates, int gate_blocks, int cols, const float *x,        \
                       float *ba)                                                                                      \
    {                                                                                                                  \
        project<FORMAT>(w, block_bytes, rows, a, proj, ahead, gates, gate_format, gate_bytes, n_gates, gate_blocks,    \
                        cols, x, ba);                                                                                  \
    }
PROJECT(I8_ROW, i8_row)
PROJECT(I8_GROUP, i8_group)
PROJECT(I4_ROW, i4_row)
PROJECT(I4_GROUP, i4_group)

/* ---- many rows ------------------------------------------------------------------------------------------------- */

#define CONV_ROWS 32 /* rows of one block of conv_heads: at least taps - 1, see there */

/* Convolution and silu of one head of one row, and l2norm times `scale` where it is a q or k head.  A warp; lane l has
 * channels l, l + 32, ..., as the sum over features wants them.  PER: channels a lane at most. */
template <int PER>
DEVICE void conv_head(const float *row, i64 stride, int t, i64 position, const float *w, int taps, int channels,
                      const float *ring, int width, bool is_normed, float scale, float *out)
{
    int lane = threadIdx.x % WARP;
    float v[PER], p = 0.0f;
#pragma unroll
    for (int i = 0; i < PER; i++)
        v[i] = 0.0f;
    for (int j = 0; j < taps; j++) { /* tap j meets the row of taps-1-j positions ago */
        int back = taps - 1 - j;
        const float *x =
            back <= t ? row - back * stride : ring + ((position - back) % taps + taps) % taps * (i64)channels;
#pragma unroll
        for (int i = 0; i < PER; i++)
            if (lane + WARP * i < width)
                v[i] = __fadd_rn(v[i], __fmul_rn(w[j * channels + lane + WARP * i], x[lane + WARP * i]));
    }
#pragma unroll
    for (int i = 0; i < PER; i++)
        if (lane + WARP * i < width) {
            v[i] = silu_(v[i]);
            p = __fadd_rn(p, __fmul_rn(v[i], v[i]));
        }
    if (is_normed) {
        float r = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(tree32(p), 1e-6f)));
#pragma unroll
        for (int i = 0; i < PER; i++)
            v[i] = __fmul_rn(__fmul_rn(v[i], r), scale);
    }
#pragma unroll
    for (int i = 0; i < PER; i++)
        if (lane + WARP * i < width)
            out[lane + WARP * i] = v[i];
}

/* u = conv_head of every head and row; ba (rows, 2 * heads), b then a, becomes beta then decay; the rings move on.
 * grid (q heads, k heads, v heads and one for ba; tiles of CONV_ROWS rows; parts), a warp a row at a time.
 * Only a part's first taps - 1 rows look into its ring, and they are all in its first tile: that block alone may
 * overwrite it. */
extern "C" __global__ void __launch_bounds__(256)
    conv_heads(const float *proj, i64 proj_stride, const float *w, int taps, int channels, int n_qk, int heads, int dk,
               int dv, float q_scale, const float *exp_a_log, const float *dt_bias, float *ba, const Part *parts,
               float *const *states, float *u)
{
    wait_for_previous();
    let_next_start();
    int piece = blockIdx.x, is_v = piece >= 2 * n_qk, width = is_v ? dv : dk;
    Part part = parts[blockIdx.z];
    int first = blockIdx.y * CONV_ROWS, end = first + CONV_ROWS < part.n_rows ? first + CONV_ROWS : part.n_rows;
    if (first >= end)
        return;
    if (piece == 2 * n_qk + heads) {
        for (int i = threadIdx.x; i < (end - first) * heads; i += blockDim.x) {
            int head = i % heads;
            float *b = ba + (i64)(part.first_row + first + i / heads) * 2 * heads + head;
            b[0] = sigmoid_(b[0]);
            b[heads] = exp_(-__fmul_rn(exp_a_log[head], softplus_(__fadd_rn(b[heads], dt_bias[head]))));
        }
        return;
    }
    int c = is_v ? 2 * n_qk * dk + (piece - 2 * n_qk) * dv : piece * dk;
    float *ring = states[2 * blockIdx.z + 1] + c;
    for (int t = first + threadIdx.x / WARP; t < end; t += blockDim.x / WARP) {
        i64 row = part.first_row + t;
        const float *x = proj + row * proj_stride + c;
        float *out = u + row * channels + c, scale = piece < n_qk ? q_scale : 1.0f;
        if (width <= 4 * WARP)
            conv_head<4>(x, proj_stride, t, part.position + t, w + c, taps, channels, ring, width, !is_v, scale, out);
        else
            conv_head<16>(x, proj_stride, t, part.position + t, w + c, taps, channels, ring, width, !is_v, scale, out);
    }
    if (first > 0)
        return;
    __syncthreads();
    for (int t = part.n_rows > taps ? part.n_rows - taps : 0; t < part.n_rows; t++)
        for (int i = threadIdx.x; i < width; i += blockDim.x)
            ring[(part.position + t) % taps * channels + i] = proj[(part.first_row + t) * proj_stride + c + i];
}

/* The recurrence of one head and 32 value columns over the rows of a part.  grid (dv / 32, heads, parts); a warp owns
 * 16 keys, a lane a column; the state stays in registers.  shared: warps * 32 floats.
 * gates (rows, 2 * heads): beta, then decay. */
extern "C" __global__ void __launch_bounds__(512, 1)
    deltanet(const Part *parts, float *const *states, const float *u, i64 u_stride, const float *gates, int n_qk,
             int heads, int dk, int dv, float *o, i64 o_stride)
{
    extern __shared__ float chunk[];
    Part part = parts[blockIdx.z];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    int column = blockIdx.x * WARP + lane, head = blockIdx.y, key_head = head / (heads / n_qk), key0 = warp * 16;
    bool mine = column < dv;
    float *rows = states[2 * blockIdx.z] + ((i64)head * dk + key0) * dv + column;
    float s[16];
#pragma unroll
    for (int i = 0; i < 16; i++)
        s[i] = mine && key0 + i < dk ? rows[(i64)i * dv] : 0.0f;
    wait_for_previous(); /* the list and the states were final before conv_heads could let this kernel start */
    let_next_start();
    for (i64 t = part.first_row; t < part.first_row + part.n_rows; t++) {
        const float *q = u + t * u_stride + key_head * dk + key0;
        const float *k = u + t * u_stride + (n_qk + key_head) * dk + key0;
        float beta = gates[t * 2 * heads + head], decay = gates[t * 2 * heads + heads + head];
        float v = mine ? u[t * u_stride + 2 * n_qk * dk + head * dv + column] : 0.0f;
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

/* ---- one row a part: everything of a head in one kernel --------------------------------------------------------- */

#define TOKEN_WIDTH 128 /* keys at most */
#define TOKEN_LANES (TOKEN_WIDTH / WARP)

/* Convolution and silu of one head of one row, as `conv_head`, in two steps: what the ring has, and then the row. */
DEVICE void conv_before(float (&v)[TOKEN_LANES], const float *w, const float *ring, int place, int taps, int channels,
                        int width)
{
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < TOKEN_LANES; i++)
        v[i] = 0.0f;
    if (lane * WARP < width)
        fetch_line(w + (taps - 1) * channels + lane * WARP);
    for (int j = 0; j < taps - 1; j++) { /* tap j meets the row of taps-1-j positions ago */
        const float *x = ring + (place + 1 + j) % taps * channels;
#pragma unroll
        for (int i = 0; i < TOKEN_LANES; i++)
            if (lane + WARP * i < width)
                v[i] = __fadd_rn(v[i], __fmul_rn(w[j * channels + lane + WARP * i], x[lane + WARP * i]));
    }
}

/* The row comes with the last tap's weights, and goes into the ring where `keeps`; out: in shared memory. */
DEVICE void conv_now(float (&v)[TOKEN_LANES], const float *last_w, const float *x, float *ring_row, bool keeps,
                     int width, bool is_normed, float scale, float *out)
{
    int lane = threadIdx.x % WARP;
    float p = 0.0f, now[TOKEN_LANES], w[TOKEN_LANES];
#pragma unroll
    for (int i = 0; i < TOKEN_LANES; i++) {
        now[i] = lane + WARP * i < width ? x[lane + WARP * i] : 0.0f;
        w[i] = lane + WARP * i < width ? last_w[lane + WARP * i] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < TOKEN_LANES; i++)
        if (lane + WARP * i < width) {
            v[i] = silu_(__fadd_rn(v[i], __fmul_rn(w[i], now[i])));
            p = __fadd_rn(p, __fmul_rn(v[i], v[i]));
            if (keeps)
                ring_row[lane + WARP * i] = now[i];
        }
    float r = is_normed ? __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(tree32(p), 1e-6f))) : 0.0f;
#pragma unroll
    for (int i = 0; i < TOKEN_LANES; i++)
        if (lane + WARP * i < width)
            out[lane + WARP * i] = is_normed ? __fmul_rn(__fmul_rn(v[i], r), scale) : v[i];
}

/* As the kernel `gated_norm`, one head of dv values by one warp; o was written by other blocks just now. */
DEVICE void gated_norm_head(float *o, const float *gate, const float *w, int dv, float eps, const Acts &a, int row,
                            int head)
{
    int lane = threadIdx.x % WARP;
    float p = 0.0f;
    for (int i = lane; i < dv; i += WARP) {
        float x = __ldcg(o + i);
        p = __fadd_rn(p, __fmul_rn(x, x));
    }
    float r = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(tree32(p), (float)dv), eps)));
    if (!a.q) {
        for (int i = lane; i < dv; i += WARP)
            o[i] = __fmul_rn(__fmul_rn(__fmul_rn(__ldcg(o + i), r), w[i]), silu_(gate[i]));
        return;
    }
    for (int g = 0; g < dv / GROUP; g++) {
        int k = g * GROUP + 4 * lane, sum;
        float4 x = __ldcg((const float4 *)(o + k)), of = load_columns(gate, k, dv), by = load_columns(w, k, dv);
        float scale;
        x.x = __fmul_rn(__fmul_rn(__fmul_rn(x.x, r), by.x), silu_(of.x));
        x.y = __fmul_rn(__fmul_rn(__fmul_rn(x.y, r), by.y), silu_(of.y));
        x.z = __fmul_rn(__fmul_rn(__fmul_rn(x.z, r), by.z), silu_(of.z));
        x.w = __fmul_rn(__fmul_rn(__fmul_rn(x.w, r), by.w), silu_(of.w));
        u32 q = quantize_group(x, &scale, &sum);
        store_group(a, row, head * (dv / GROUP) + g, lane, q, scale, sum);
    }
}

/* Convolution, recurrence and gated norm of one head of one row a part, for dk <= 128, a multiple of 16: quantised
 * where acts are given (dv is then a multiple of 128), in o where not.  grid (dv / 32, v heads, parts), a warp 16 keys,
 * at least 4 warps.  ba (rows, 2 * heads): b, then a.  The list must be final before this kernel can start.
 *
 * Blocks of a head all convolve q and k; the one that ends last takes the norm.  They are counted behind the ring,
 * where a zero a head is between kernels.  A row goes where the row `taps` before it was, which nobody reads.
 */
extern "C" __global__ void __launch_bounds__(256)
    deltanet_token(const float *proj, i64 proj_stride, const float *w, int taps, int channels, int n_qk, int heads,
                   int dk, int dv, float q_scale, const float *exp_a_log, const float *dt_bias, const float *ba,
                   const Part *parts, float *const *states, const float *norm, float eps, float *o, i64 o_stride,
                   Acts a)
{
    __shared__ __align__(16) float q[TOKEN_WIDTH], k[TOKEN_WIDTH];
    __shared__ float v[WARP], sums[2][TOKEN_WIDTH / 16][WARP], gates[2];
    let_next_start();
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, head = blockIdx.y, per = heads / n_qk;
    int chunks = dk / 16, column = blockIdx.x * WARP + lane, key0 = warp * 16;
    bool mine = warp < chunks && column < dv;
    Part part = parts[blockIdx.z];
    int place = part.position % taps;
    float *state = states[2 * blockIdx.z] + ((i64)head * dk + key0) * dv + column;
    float *ring = states[2 * blockIdx.z + 1];
    float s[16];
#pragma unroll
    for (int i = 0; i < 16; i++)
        s[i] = mine ? state[(i64)i * dv] : 0.0f;
    /* three of the warps also convolve: q, k, and this block's columns of v */
    int c = warp < 2 ? (warp * n_qk + head / per) * dk : 2 * n_qk * dk + head * dv + blockIdx.x * WARP;
    int width = warp < 2 ? dk : dv - blockIdx.x * WARP < WARP ? dv - blockIdx.x * WARP : WARP;
    float conv[TOKEN_LANES];
    if (warp < 3)
        conv_before(conv, w + c, ring + c, place, taps, channels, width);
    wait_for_previous();
    const float *row = proj + part.first_row * proj_stride;
    if (warp < 3)
        conv_now(conv, w + (taps - 1) * channels + c, row + c, ring + place * channels + c,
                 warp == 2 || (head % per == 0 && blockIdx.x == 0), width, warp < 2, warp == 0 ? q_scale : 1.0f,
                 warp == 0 ? q : warp == 1 ? k : v);
    else if (warp == 3 && lane == 0) {
        const float *b = ba + (i64)part.first_row * 2 * heads + head;
        gates[0] = sigmoid_(b[0]);
        gates[1] = exp_(-__fmul_rn(exp_a_log[head], softplus_(__fadd_rn(b[heads], dt_bias[head]))));
    }
    __syncthreads();
    float beta = gates[0], decay = gates[1], acc = 0.0f;
    if (mine) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            s[i] = __fmul_rn(decay, s[i]);
            acc = __fadd_rn(acc, __fmul_rn(s[i], k[key0 + i]));
        }
        sums[0][warp][lane] = acc;
    }
    __syncthreads();
    if (mine) {
        float kv = 0.0f;
        for (int i = 0; i < chunks; i++)
            kv = __fadd_rn(kv, sums[0][i][lane]);
        float d = __fmul_rn(__fsub_rn(v[lane], kv), beta);
        acc = 0.0f;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            s[i] = __fadd_rn(s[i], __fmul_rn(k[key0 + i], d));
            acc = __fadd_rn(acc, __fmul_rn(s[i], q[key0 + i]));
        }
        sums[1][warp][lane] = acc;
    }
    __syncthreads();
    float *to = o + part.first_row * o_stride + head * dv;
    if (warp == 0) {
        if (mine) {
            float sum = 0.0f;
            for (int i = 0; i < chunks; i++)
                sum = __fadd_rn(sum, sums[1][i][lane]);
            to[column] = sum;
        }
        __threadfence();
        __syncwarp();
        u32 before = 0, *done = (u32 *)(ring + taps * channels) + head;
        if (lane == 0)
            before = atomicAdd(done, 1);
        if (__shfl_sync(ALL, before, 0) == gridDim.x - 1) {
            __threadfence();
            gated_norm_head(to, row + channels + head * dv, norm, dv, eps, a, part.first_row, head);
            if (lane == 0)
                *done = 0;
        }
    }
    if (mine)
#pragma unroll
        for (int i = 0; i < 16; i++)
            state[(i64)i * dv] = s[i];
}

#define DELTA_ROWS 16   /* rows that are staged at once */
#define DELTA_KEYS 128  /* keys at most */
#define DELTA_COLUMNS 32

/* Shared memory of deltanet_rows: rows of one turn.  A quad of keys 16c + 4i .. + 3 lies at [i][c], so that eight lanes
 * with a chunk c each read eight neighbours. */
struct DeltaStage {
    float4 q[DELTA_ROWS][4][8], k[DELTA_ROWS][4][8];
    float v[DELTA_ROWS][DELTA_COLUMNS];
    float gates[DELTA_ROWS][2];
};

/* The chunk sums of a column, one a lane of eight, added ascending; all eight get the sum. */
DEVICE float add_chunks(float mine, int lane)
{
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < 8; c++)
        sum = __fadd_rn(sum, __shfl_sync(ALL, mine, (lane & 24) | c));
    return sum;
}

/* The same recurrence over many rows, for dk <= 128, dk and dv multiples of 4.  grid (dv / 32, heads, parts), 4 warps;
 * eight lanes a pair of columns, 16 keys each, so that nothing but shuffles stands between one row and the next.  The
 * next rows are on their way into shared memory meanwhile.  Keys past dk are zeros, which change no sum. */
extern "C" __global__ void __launch_bounds__(128)
    deltanet_rows(const Part *parts, float *const *states, const float *u, i64 u_stride, const float *gates, int n_qk,
                  int heads, int dk, int dv, float *o, i64 o_stride)
{
    __shared__ __align__(16) DeltaStage stages[2];
    Part part = parts[blockIdx.z];
    const int tid = threadIdx.x, lane = tid % WARP, chunk = lane % 8;
    int head = blockIdx.y, key_head = head / (heads / n_qk), column0 = blockIdx.x * DELTA_COLUMNS;
    int in_block = tid / WARP * 8 + lane / 8 * 2, column = column0 + in_block;
    bool mine = column < dv;
    float *state = states[2 * blockIdx.z] + (i64)head * dk * dv + column;
    float s[2][16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float2 of = make_float2(0.0f, 0.0f);
        if (mine && 16 * chunk + i < dk)
            of = *(const float2 *)(state + (i64)(16 * chunk + i) * dv);
        s[0][i] = of.x;
        s[1][i] = of.y;
    }
    for (int i = tid; i < (int)sizeof(stages) / 16; i += blockDim.x) /* for keys and columns that do not exist */
        ((float4 *)stages)[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    wait_for_previous(); /* as above */
    let_next_start();
    __syncthreads();
    auto stage = [&](int first, DeltaStage &to) {
        int n = part.n_rows - first < DELTA_ROWS ? part.n_rows - first : DELTA_ROWS, quads = dk / 4;
        const float *rows = u + (part.first_row + first) * u_stride;
        for (int i = tid; i < n * quads; i += blockDim.x) {
            const float *key = rows + i / quads * u_stride + key_head * dk + i % quads * 4;
            int r = i / quads, at = i % quads;
            copy16(&to.q[r][at % 4][at / 4], key);
            copy16(&to.k[r][at % 4][at / 4], key + n_qk * dk);
        }
        for (int i = tid; i < n * (DELTA_COLUMNS / 4); i += blockDim.x) {
            int r = i / (DELTA_COLUMNS / 4), at = i % (DELTA_COLUMNS / 4) * 4;
            if (column0 + at < dv)
                copy16(&to.v[r][at], rows + r * u_stride + 2 * n_qk * dk + head * dv + column0 + at);
        }
        if (tid < 2 * n)
            to.gates[tid / 2][tid % 2] =
                gates[((i64)(part.first_row + first + tid / 2) * 2 + tid % 2) * heads + head];
        copies_end();
    };
    stage(0, stages[0]);
    for (int first = 0; first < part.n_rows; first += DELTA_ROWS) {
        int turn = first / DELTA_ROWS & 1, n = part.n_rows - first;
        const DeltaStage &now = stages[turn];
        if (n > DELTA_ROWS) {
            stage(first + DELTA_ROWS, stages[turn ^ 1]);
            copies_wait<1>();
            n = DELTA_ROWS;
        } else
            copies_wait<0>();
        __syncthreads();
        float *out = o + (part.first_row + first) * o_stride + head * dv + column;
#pragma unroll 2
        for (int r = 0; r < n; r++) {
            float beta = now.gates[r][0], decay = now.gates[r][1], sum[2] = {0.0f, 0.0f}, k[16];
#pragma unroll
            for (int i = 0; i < 4; i++)
                *(float4 *)&k[4 * i] = now.k[r][i][chunk];
#pragma unroll
            for (int i = 0; i < 16; i++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    s[c][i] = __fmul_rn(decay, s[c][i]);
                    sum[c] = __fadd_rn(sum[c], __fmul_rn(s[c][i], k[i]));
                }
            float2 v = *(const float2 *)&now.v[r][in_block];
            float d[2] = {__fmul_rn(__fsub_rn(v.x, add_chunks(sum[0], lane)), beta),
                          __fmul_rn(__fsub_rn(v.y, add_chunks(sum[1], lane)), beta)};
            float q[16];
#pragma unroll
            for (int i = 0; i < 4; i++)
                *(float4 *)&q[4 * i] = now.q[r][i][chunk];
            sum[0] = sum[1] = 0.0f;
#pragma unroll
            for (int i = 0; i < 16; i++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    s[c][i] = __fadd_rn(s[c][i], __fmul_rn(k[i], d[c]));
                    sum[c] = __fadd_rn(sum[c], __fmul_rn(s[c][i], q[i]));
                }
            float2 y = make_float2(add_chunks(sum[0], lane), add_chunks(sum[1], lane));
            if (mine && chunk == 0)
                *(float2 *)(out + r * o_stride) = y;
        }
        __syncthreads(); /* these rows have been used */
    }
    if (mine)
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (16 * chunk + i < dk)
                *(float2 *)(state + (i64)(16 * chunk + i) * dv) = make_float2(s[0][i], s[1][i]);
}

/* rmsnorm(o; w) * silu(z), a head of n values of one row a warp: quantised where acts are given (n is then a multiple
 * of 128), in place where not.  grid (heads * rows / 4), 4 warps. */
extern "C" __global__ void __launch_bounds__(128)
    gated_norm(float *o, i64 o_stride, const float *z, i64 z_stride, const float *w, int n, float eps, int heads,
               int n_rows, Acts a)
{
    wait_for_previous();
    let_next_start();
    int lane = threadIdx.x % WARP;
    i64 item = (i64)blockIdx.x * 4 + threadIdx.x / WARP;
    if (item >= (i64)heads * n_rows)
        return;
    i64 row = item / heads;
    int head = item % heads;
    float *x = o + row * o_stride + head * n;
    const float *gate = z + row * z_stride + head * n;
    float p = 0.0f;
    for (int i = lane; i < n; i += WARP)
        p = __fadd_rn(p, __fmul_rn(x[i], x[i]));
    float r = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(tree32(p), (float)n), eps)));
    if (!a.q) {
        for (int i = lane; i < n; i += WARP)
            x[i] = __fmul_rn(__fmul_rn(__fmul_rn(x[i], r), w[i]), silu_(gate[i]));
        return;
    }
    for (int g = 0; g < n / GROUP; g++) {
        int k = g * GROUP + 4 * lane, sum;
        float4 v = load_columns(x, k, n), of = load_columns(gate, k, n), by = load_columns(w, k, n);
        float scale;
        v.x = __fmul_rn(__fmul_rn(__fmul_rn(v.x, r), by.x), silu_(of.x));
        v.y = __fmul_rn(__fmul_rn(__fmul_rn(v.y, r), by.y), silu_(of.y));
        v.z = __fmul_rn(__fmul_rn(__fmul_rn(v.z, r), by.z), silu_(of.z));
        v.w = __fmul_rn(__fmul_rn(__fmul_rn(v.w, r), by.w), silu_(of.w));
        u32 q = quantize_group(v, &scale, &sum);
        store_group(a, row, head * (n / GROUP) + g, lane, q, scale, sum);
    }
}
