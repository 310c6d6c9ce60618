/* What a layer does between its mixer and the next one's, for rows that stay on the card: residual and norm, router,
 * top-k, the experts of few rows, and the sum over ranks.  Where the card lacks an expert it asks the host: a mailbox in
 * pinned memory, which the host watches while the card computes what it has.
 *
 * Sums follow docs/numerics.md, section 4.  Kernels here may start while the one before them still runs; each of them
 * waits for it in every block, so that "the previous kernel is done" always means all kernels before that one, too.
 */

/* Where the card and its host meet, in pinned memory; a 64-byte line each. */
struct Mail {
    u32 asked; /* how many layers have asked, ever */
    u32 pad0[15];
    u32 answered; /* up to which number the host has answered */
    u32 pad1[15];
    u32 abort; /* the host will not answer any more */
    u32 pad2[15];
    u32 late; /* the card has given up waiting */
    u32 pad3[15];
};

/* The card's side of it. */
struct Ask {
    u32 number;  /* of the layer that asked last */
    u32 missing; /* ranks that it lacked */
};

#define ANSWER_LIMIT_NS 20000000000ull

DEVICE u64 clock_ns()
{
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

DEVICE void nap()
{
    __nanosleep(100);
}

/* ---- rows and norms ------------------------------------------------------------------------------------------- */

DEVICE void store_columns(float *x, int k, int cols, float4 v)
{
    if (k + 3 < cols && ((u64)(x + k) & 15) == 0) {
        *(float4 *)(x + k) = v;
        return;
    }
    if (k < cols)
        x[k] = v.x;
    if (k + 1 < cols)
        x[k + 1] = v.y;
    if (k + 2 < cols)
        x[k + 2] = v.z;
    if (k + 3 < cols)
        x[k + 3] = v.w;
}

DEVICE float4 scale4(float4 a, float s)
{
    return make_float4(__fmul_rn(a.x, s), __fmul_rn(a.y, s), __fmul_rn(a.z, s), __fmul_rn(a.w, s));
}

/* xn = rmsnorm(row) * w of the row of n values in shared memory (with room for one more), in whole groups of 128, then
 * quantised; a copy of it for the host where `host` is given.  first_w: w of this thread's first four columns, loaded
 * ahead.  All threads of the block come here, none of them behind a barrier since the row was written. */
DEVICE void norm_row(float *row, int n, const float *w, float4 first_w, float eps, float *xn, float *host,
                     const Acts &a, int token)
{
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    __syncthreads();
    if (warp == 0) {
        float p = 0.0f;
#pragma unroll 16
        for (int i = lane; i < n; i += WARP)
            p = __fadd_rn(p, __fmul_rn(row[i], row[i]));
        p = tree32(p);
        if (lane == 0)
            row[n] = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(p, (float)n), eps)));
    }
    __syncthreads();
    float r = row[n];
    for (int g = warp; g < a.n_groups; g += blockDim.x / WARP) {
        int k = g * GROUP + 4 * lane, sum;
        float scale;
        float4 v = scale4(load_columns(row, k, n), r), by = g == warp ? first_w : load_columns(w, k, n);
        v.x = __fmul_rn(v.x, by.x);
        v.y = __fmul_rn(v.y, by.y);
        v.z = __fmul_rn(v.z, by.z);
        v.w = __fmul_rn(v.w, by.w);
        *(float4 *)(xn + k) = v;
        if (host)
            store_columns(host, k, n, v);
        u32 q = quantize_group(v, &scale, &sum);
        store_group(a, token, g, lane, q, scale, sum);
    }
}

DEVICE int first_column() { return threadIdx.x / WARP * GROUP + threadIdx.x % WARP * 4; }

/* The rows of a batch and its list come up from pinned memory, and the rows get their first norm.  grid (n_rows, and
 * blocks for the list), shared: n + 1 floats (so everywhere below).  Rows on the card: n_groups * 128 floats. */
extern "C" __global__ void __launch_bounds__(1024)
    begin_rows(const float *host, i64 host_stride, float *x, const float *w, int n, float eps, float *xn, Acts a,
               int n_rows, const u32 *list, u32 *list_here, int n_words)
{
    extern __shared__ __align__(16) float row[];
    let_next_start();
    if (blockIdx.x >= n_rows) {
        int step = (gridDim.x - n_rows) * blockDim.x;
        for (int i = (blockIdx.x - n_rows) * blockDim.x + threadIdx.x; i < n_words; i += step)
            list_here[i] = list[i];
        return;
    }
    i64 at = (i64)blockIdx.x * a.n_groups * GROUP;
    float4 first_w = load_columns(w, first_column(), n);
    for (int k = first_column(); k < n; k += blockDim.x * 4) {
        float4 v = load_columns(host + blockIdx.x * host_stride, k, n);
        store_columns(row, k, n, v);
        store_columns(x + at, k, n, v);
    }
    norm_row(row, n, w, first_w, eps, xn + at, 0, a, blockIdx.x);
}

/* x = x + y, then its norm.  grid (rows). */
extern "C" __global__ void __launch_bounds__(1024)
    residual_norm(float *x, const float *y, i64 y_stride, const float *w, int n, float eps, float *xn, float *host,
                  i64 host_stride, Acts a)
{
    extern __shared__ __align__(16) float row[];
    let_next_start();
    i64 at = (i64)blockIdx.x * a.n_groups * GROUP;
    float4 first_w = load_columns(w, first_column(), n);
    wait_for_previous();
    for (int k = first_column(); k < n; k += blockDim.x * 4) {
        float4 v = add4(load_columns(x + at, k, n), load_columns(y + blockIdx.x * y_stride, k, n));
        store_columns(row, k, n, v);
        store_columns(x + at, k, n, v);
    }
    norm_row(row, n, w, first_w, eps, xn + at, host ? host + blockIdx.x * host_stride : host, a, blockIdx.x);
}

/* The norm of some rows: rows[i] of x becomes row i of xn.  grid (rows wanted). */
extern "C" __global__ void __launch_bounds__(1024)
    gather_norm(const float *x, const int *rows, const float *w, int n, float eps, float *xn, Acts a)
{
    extern __shared__ __align__(16) float row[];
    let_next_start();
    i64 width = (i64)a.n_groups * GROUP;
    float4 first_w = load_columns(w, first_column(), n);
    wait_for_previous();
    const float *from = x + rows[blockIdx.x] * width;
    for (int k = first_column(); k < n; k += blockDim.x * 4)
        store_columns(row, k, n, load_columns(from, k, n));
    norm_row(row, n, w, first_w, eps, xn + blockIdx.x * width, 0, a, blockIdx.x);
}

/* Rows of n values to pinned memory, where they lie without gaps.  grid (rows). */
extern "C" __global__ void __launch_bounds__(256) send_rows(const float *x, i64 x_stride, int n, float *host)
{
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        host[(i64)blockIdx.x * n + i] = x[blockIdx.x * x_stride + i];
}

/* ---- router --------------------------------------------------------------------------------------------------- */

#define HELD 64       /* columns of a lane that are held in registers: 2,048 in all */
#define ROUTER_ROWS 8 /* rows of x for one visit to the weights */

/* y[t][r] = w[r] . x[t] of unquantised rows, for two matrices at once: n0 rows of w0, then n1 of w1.  A warp a row of
 * weights, which it has in registers before it waits for x.  grid (rows of weights / 2, tiles of 8 rows of x). */
template <int FORMAT>
DEVICE void router_logits(const u8 *w0, int n0, float *y0, const u8 *w1, int n1, float *y1, i64 row_bytes, int cols,
                          const float *x, i64 x_stride, int n_rows)
{
    let_next_start();
    int lane = threadIdx.x % WARP, r = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    bool second = r >= n0;
    int stride = second ? n1 : n0;
    const u8 *w = second ? w1 + (r - n0) * row_bytes : w0 + r * row_bytes;
    float *y = second ? y1 + (r - n0) : y0 + r;
    bool mine = r < n0 + n1;
    float held[HELD];
#pragma unroll
    for (int i = 0; i < HELD; i++)
        held[i] = mine && lane + WARP * i < cols ? widen<FORMAT>(w, lane + WARP * i) : 0.0f;
    wait_for_previous();
    if (!mine)
        return;
    int t0 = blockIdx.y * ROUTER_ROWS, t1 = t0 + ROUTER_ROWS < n_rows ? t0 + ROUTER_ROWS : n_rows;
    for (int t = t0; t < t1; t++) {
        const float *row = x + t * x_stride;
        float p = 0.0f;
#pragma unroll
        for (int i = 0; i < HELD; i++)
            if (lane + WARP * i < cols)
                p = __fadd_rn(p, __fmul_rn(held[i], row[lane + WARP * i]));
        for (int i = lane + WARP * HELD; i < cols; i += WARP)
            p = __fadd_rn(p, __fmul_rn(widen<FORMAT>(w, i), row[i]));
        p = tree32(p);
        if (lane == 0)
            y[(i64)t * stride] = p;
    }
}

#define ROUTER(FORMAT, NAME)                                                                                           \
    extern "C" __global__ void __launch_bounds__(64)                                                                   \
        router_logits_##NAME(const u8 *w0, int n0, float *y0, const u8 *w1, int n1, float *y1, i64 row_bytes,          \
                             int cols, const float *x, i64 x_stride, int n_rows)                                       \
    {                                                                                                                  \
        router_logits<FORMAT>(w0, n0, y0, w1, n1, y1, row_bytes, cols, x, x_stride, n_rows);                           \
    }
ROUTER(F32, f32)
ROUTER(BF16, bf16)
ROUTER(F16, f16)

/* An unsigned number that orders as its float does: -0 as +0, and never 0 itself. */
DEVICE u32 order_key(float x)
{
    u32 bits = __float_as_uint(__fadd_rn(x, 0.0f));
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

DEVICE float key_value(u32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

/* Lane j < top_k gets the j-th largest of n <= 32 * PER logits and its index, the lower index first on ties; all lanes
 * get the largest.  Lane l looks after indices l * PER and on. */
template <int PER>
DEVICE void top_of_row(const float *logits, int n, int top_k, int lane, int *index, float *logit, float *largest)
{
    u32 key[PER];
#pragma unroll
    for (int i = 0; i < PER; i++)
        key[i] = lane * PER + i < n ? order_key(logits[lane * PER + i]) : 0;
    for (int j = 0; j < top_k; j++) {
        u32 best = key[0];
        int place = 0;
#pragma unroll
        for (int i = 1; i < PER; i++)
            if (key[i] > best) {
                best = key[i];
                place = i;
            }
        u32 most = warp_max(best);
        int owner = __ffs(__ballot_sync(ALL, best == most)) - 1; /* the lowest lane has the lowest indices */
        int found = owner * PER + __shfl_sync(ALL, place, owner);
#pragma unroll
        for (int i = 0; i < PER; i++)
            if (lane == owner && i == place)
                key[i] = 0;
        if (j == 0)
            *largest = key_value(most);
        if (lane == j) {
            *index = found < n ? found : n - 1; /* a NaN is nobody's logit, but an index it must be */
            *logit = key_value(most);
        }
    }
}

/* Experts of n_rows rows: which, their weights (rows, top_k), the shared expert's gate (rows), and a job each.
 *
 * slots[e]: where expert e lies, 0 where it is not here.  What the host wants to know goes to pinned memory: the choice
 * always; where `mail` is given, external_host (1: it is here), the number of those that are not, and then the news.
 * One block, a warp a row at a time.  shared: n words of 8 bytes. */
template <int PER>
DEVICE void choose_experts(const float *logits, const float *gate, int n, int top_k, int n_rows, const u64 *slots,
                           float *w, float *gate_out, Job *jobs, int *idx, int *idx_host, u8 *external_host,
                           u32 *missing_host, Ask *ask, volatile Mail *mail)
{
    extern __shared__ __align__(16) u64 slots_here[];
    __shared__ int missing_of[WARP];
    let_next_start();
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, missing = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        slots_here[i] = slots[i];
    wait_for_previous();
    __syncthreads();
    for (int row = warp; row < n_rows; row += blockDim.x / WARP) {
        float z = lane == 0 ? gate[row] : 0.0f, logit = 0.0f, largest = 0.0f;
        int index = 0;
        top_of_row<PER>(logits + (i64)row * n, n, top_k, lane, &index, &logit, &largest);
        float p = lane < top_k ? exp_(__fsub_rn(logit, largest)) : 0.0f;
        float sum = tree32(__fadd_rn(0.0f, p));
        bool lacks = false;
        if (lane < top_k) {
            int i = row * top_k + lane;
            Job job;
            job.slab = slots_here[index];
            job.row = row;
            job.out = i;
            lacks = !job.slab;
            jobs[i] = job;
            w[i] = __fdiv_rn(p, sum);
            idx[i] = index;
            idx_host[i] = index;
            if (mail)
                external_host[i] = !lacks;
        }
        if (lane == 0)
            gate_out[row] = sigmoid_(z);
        missing += __popc(__ballot_sync(ALL, lacks));
    }
    if (!mail)
        return;
    if (lane == 0)
        missing_of[warp] = missing;
    __syncthreads();
    if (threadIdx.x > 0)
        return;
    for (int i = 1; i < blockDim.x / WARP; i++)
        missing += missing_of[i];
    ask->missing = missing;
    u32 number = ask->number + 1;
    ask->number = number;
    *missing_host = missing;
    __threadfence_system();
    mail->asked = number;
}

#define CHOOSE(PER)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(1024)                                                                 \
        choose_experts_##PER(const float *logits, const float *gate, int n, int top_k, int n_rows, const u64 *slots,   \
                             float *w, float *gate_out, Job *jobs, int *idx, int *idx_host, u8 *external_host,         \
                             u32 *missing_host, Ask *ask, volatile Mail *mail)                                         \
    {                                                                                                                  \
        choose_experts<PER>(logits, gate, n, top_k, n_rows, slots, w, gate_out, jobs, idx, idx_host, external_host,    \
                            missing_host, ask, mail);                                                                  \
    }
CHOOSE(8)
CHOOSE(16)
CHOOSE(32)

/* ---- experts of few rows -------------------------------------------------------------------------------------- */

/* Experts of one format: parts of a slab, and the blocks of 16 rows of one. */
struct Slabs {
    i64 gate_offset, up_offset, down_offset, gate_bytes, down_bytes; /* bytes of a block */
    int format, dim, gate_blocks, down_blocks, down_groups, pad;
};

/* 16 values of h = silu(gate x) * up x.  The first half of the warps takes gate, the other up. */
template <int FORMAT>
DEVICE void gate_up_block(const u8 *gate, const u8 *up, const Acts &a, int row, int n_rows, float *h, int left)
{
    extern __shared__ float products[];
    int warp = threadIdx.x / WARP, half = blockDim.x / WARP / 2, is_up = warp >= half;
    /* in the first warp, lanes 0..15 will add gate's rows and 16..31 up's */
    float row_scale = load_row_scale<FORMAT>(threadIdx.x / BLOCK_ROWS & 1 ? up : gate, threadIdx.x % BLOCK_ROWS);
    block_products<FORMAT, 2, 1>(is_up ? up : gate, a, row, n_rows, is_up ? warp - half : warp, half,
                                 threadIdx.x % WARP, products + is_up * a.n_groups * BLOCK_ROWS);
    wait_for_previous(); /* where a warp had no group */
    let_next_start();    /* the job list is final, which `moe_down` reads ahead */
    __syncthreads();
    if (threadIdx.x >= WARP)
        return;
    is_up = threadIdx.x / BLOCK_ROWS;
    int r = threadIdx.x % BLOCK_ROWS;
    float v = add_groups<FORMAT>(row_scale, products + is_up * a.n_groups * BLOCK_ROWS, a.n_groups, r);
    float other = __shfl_down_sync(ALL, v, BLOCK_ROWS);
    if (!is_up && r < left)
        h[r] = __fmul_rn(silu_(v), other);
}

/* Which expert a block works for: the shared one of each row first, whose weights need no job, then the jobs. */
struct Share {
    bool is_shared;
    int job, block; /* job: row, where it is shared */
};

DEVICE Share share_of_block(int shared_blocks, int blocks, int n_rows)
{
    Share s;
    int at = blockIdx.x;
    s.is_shared = at < shared_blocks * n_rows;
    if (!s.is_shared)
        at -= shared_blocks * n_rows;
    int per = s.is_shared ? shared_blocks : blocks;
    s.job = at / per;
    s.block = at % per;
    return s;
}

/* h of the shared expert (rows, shared.dim) and of every job (jobs, experts.dim).  grid (n_rows * shared.gate_blocks +
 * jobs * experts.gate_blocks), shared: 2 * n_groups * 16 floats.  A job without a slab is the host's. */
extern "C" __global__ void __launch_bounds__(512, 2)
    moe_gate_up(Slabs experts, const Job *jobs, float *h, Slabs shared, const u8 *shared_slab, float *shared_h, Acts a,
                int n_rows)
{
    Share s = share_of_block(shared.gate_blocks, experts.gate_blocks, n_rows);
    Slabs of = s.is_shared ? shared : experts;
    const u8 *slab = shared_slab;
    int row = s.job;
    if (!s.is_shared) {
        wait_for_previous();
        let_next_start();
        Job job = jobs[s.job];
        slab = (const u8 *)job.slab;
        row = job.row;
        if (!slab)
            return;
    }
    const u8 *gate = slab + of.gate_offset + s.block * of.gate_bytes, *up = slab + of.up_offset + s.block * of.gate_bytes;
    int left = of.dim - s.block * BLOCK_ROWS;
    float *out = (s.is_shared ? shared_h : h) + (i64)s.job * of.dim + s.block * BLOCK_ROWS;
    switch (of.format) {
    case I8_ROW:
        gate_up_block<I8_ROW>(gate, up, a, row, n_rows, out, left);
        break;
    case I8_GROUP:
        gate_up_block<I8_GROUP>(gate, up, a, row, n_rows, out, left);
        break;
    case I4_ROW:
        gate_up_block<I4_ROW>(gate, up, a, row, n_rows, out, left);
        break;
    default:
        gate_up_block<I4_GROUP>(gate, up, a, row, n_rows, out, left);
    }
}

/* 16 values of down h; a warp quantises the groups of h that it multiplies. */
template <int FORMAT>
DEVICE void down_block(const u8 *block, int n_groups, const float *h, int dim, float *y, int left)
{
    extern __shared__ float products[];
    const int n = Pieces<FORMAT>::n;
    const u8 *payload = block + header_bytes(FORMAT, n_groups);
    int lane = threadIdx.x % WARP;
    float row_scale = load_row_scale<FORMAT>(block, threadIdx.x % BLOCK_ROWS);
    for (int g = threadIdx.x / WARP; g < n_groups; g += blockDim.x / WARP) {
        uint4 w[n];
        load_group<FORMAT, 0>(payload + g * (n * 512) + lane * 16, w);
        float weight_scale = 0.0f, scale;
        int sum;
        if (FORMAT & 1)
            weight_scale = half_to_float(((const u16 *)block)[g * BLOCK_ROWS + row_of_lane(lane)]);
        wait_for_previous();
        u32 q = quantize_group(load_columns(h, g * GROUP + 4 * lane, dim), &scale, &sum);
        Words<FORMAT> x = share_words<FORMAT>(q, lane);
        float p = group_product<FORMAT>(w, x, scale, sum, weight_scale, lane);
        if (!(lane & 4))
            products[g * BLOCK_ROWS + row_of_lane(lane)] = p;
    }
    wait_for_previous();
    __syncthreads();
    if (threadIdx.x < left && threadIdx.x < BLOCK_ROWS)
        y[threadIdx.x] = add_groups<FORMAT>(row_scale, products, n_groups, threadIdx.x);
}

/* y of the shared expert (rows, hidden) and of every job (jobs, hidden), unweighted.  grid (n_rows *
 * shared.down_blocks + jobs * experts.down_blocks), shared: the larger down_groups * 16 floats. */
extern "C" __global__ void __launch_bounds__(512, 2)
    moe_down(Slabs experts, const Job *jobs, const float *h, float *y, Slabs shared, const u8 *shared_slab,
             const float *shared_h, float *shared_y, int hidden, int n_rows)
{
    let_next_start();
    Share s = share_of_block(shared.down_blocks, experts.down_blocks, n_rows);
    Slabs of = s.is_shared ? shared : experts;
    const u8 *slab = s.is_shared ? shared_slab : (const u8 *)jobs[s.job].slab;
    if (!slab) {
        wait_for_previous();
        return;
    }
    const u8 *block = slab + of.down_offset + s.block * of.down_bytes;
    const float *from = (s.is_shared ? shared_h : h) + (i64)s.job * of.dim;
    float *out = (s.is_shared ? shared_y : y) + (i64)s.job * hidden + s.block * BLOCK_ROWS;
    int left = hidden - s.block * BLOCK_ROWS;
    switch (of.format) {
    case I8_ROW:
        down_block<I8_ROW>(block, of.down_groups, from, of.dim, out, left);
        break;
    case I8_GROUP:
        down_block<I8_GROUP>(block, of.down_groups, from, of.dim, out, left);
        break;
    case I4_ROW:
        down_block<I4_ROW>(block, of.down_groups, from, of.dim, out, left);
        break;
    default:
        down_block<I4_GROUP>(block, of.down_groups, from, of.dim, out, left);
    }
}

/* ---- the sum over ranks --------------------------------------------------------------------------------------- */

/* Until the host has answered the layer that asked last, if it lacked anything; `always`: it did.  One thread. */
DEVICE void wait_for_host(const Ask *ask, volatile Mail *mail, bool always)
{
    if (!always && ask->missing == 0)
        return;
    u64 start = clock_ns();
    while ((int)(mail->answered - ask->number) < 0 && !mail->abort && !mail->late) {
        if (clock_ns() - start > ANSWER_LIMIT_NS) {
            mail->late = 1;
            break;
        }
        nap();
    }
    __threadfence_system();
}

/* For many rows, whose blocks should not all watch the mailbox. */
extern "C" __global__ void __launch_bounds__(32) await_answer(const Ask *ask, volatile Mail *mail, int always)
{
    wait_for_previous();
    if (threadIdx.x == 0)
        wait_for_host(ask, mail, always);
}

/* x = x + (experts in rank order + shared expert); then the norm of the next layer where w is given, and a copy of x
 * for the host where it is.  grid (rows).
 *
 * y (rows, top_k, n), shared_y (rows, n): the card's.  y_host, shared_host: what the host has answered; y_host where a
 * job has no slab, shared_host where it is given.  mail: to wait at here. */
extern "C" __global__ void __launch_bounds__(1024)
    combine_norm(float *x, int n, const float *y, const float *shared_y, const float *top_w, const float *shared_w,
                 int top_k, const Job *jobs, const float *y_host, const float *shared_host, const Ask *ask,
                 volatile Mail *mail, const float *w, float eps, float *xn, Acts a, float *x_host)
{
    extern __shared__ __align__(16) float row[];
    let_next_start();
    i64 at = (i64)blockIdx.x * a.n_groups * GROUP, first = (i64)blockIdx.x * top_k;
    float4 first_w = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (w)
        first_w = load_columns(w, first_column(), n);
    wait_for_previous();
    if (mail) {
        if (threadIdx.x == 0)
            wait_for_host(ask, mail, shared_host != 0);
        __syncthreads();
    }
    float shared_weight = shared_w[blockIdx.x];
    const float *of_shared = (shared_host ? shared_host : shared_y) + (i64)blockIdx.x * n;
    for (int k = first_column(); k < n; k += blockDim.x * 4) {
        float4 v = load_columns(x + at, k, n), last = load_columns(of_shared, k, n);
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
        for (int j = 0; j < top_k; j++) {
            const float *from = y_host && !jobs[first + j].slab ? y_host : y;
            float4 part = scale4(load_columns(from + (first + j) * n, k, n), top_w[first + j]);
            sum = j == 0 ? part : add4(sum, part);
        }
        v = add4(v, add4(sum, scale4(last, shared_weight)));
        store_columns(row, k, n, v);
        store_columns(x + at, k, n, v);
        if (x_host)
            store_columns(x_host + (i64)blockIdx.x * n, k, n, v);
    }
    if (w)
        norm_row(row, n, w, first_w, eps, xn + at, 0, a, blockIdx.x);
}
