/* Between host and card: activations are pulled from pinned memory and quantised on the way; a flag says "done".
 *
 * Answers need no kernel of their own: the last product writes them to pinned memory, and the flag's kernel starts
 * when all of it is written.
 */

/* Quantise x (n_tokens, cols) and copy n_words of job list; x_here, where given, keeps x (n_tokens, n_groups * 128) as
 * it is.  A warp takes one group of one token. */
extern "C" __global__ void __launch_bounds__(128) pull(const float *x, i64 x_stride, int cols, int n_tokens, Acts a,
                                                       const u32 *list, u32 *list_here, int n_words, float *x_here)
{
    let_next_start();
    int lane = threadIdx.x % WARP;
    i64 item = (i64)blockIdx.x * 4 + threadIdx.x / WARP;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n_words; i += gridDim.x * blockDim.x)
        list_here[i] = list[i];
    if (item >= (i64)n_tokens * a.n_groups)
        return;
    int token = item / a.n_groups, g = item % a.n_groups, sum;
    float scale;
    float4 v = load_columns(x + token * x_stride, g * GROUP + 4 * lane, cols);
    if (x_here)
        *(float4 *)(x_here + item * GROUP + 4 * lane) = v;
    u32 q = quantize_group(v, &scale, &sum);
    store_group(a, token, g, lane, q, scale, sum);
}

/* The same for float formats: x stays float32. */
extern "C" __global__ void __launch_bounds__(256)
    pull_float(const float *x, i64 n, float *x_here, const u32 *list, u32 *list_here, int n_words)
{
    i64 step = (i64)gridDim.x * blockDim.x, first = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    for (i64 i = first; i < n_words; i += step)
        list_here[i] = list[i];
    for (i64 i = first; i < n; i += step)
        x_here[i] = x[i];
}

extern "C" __global__ void __launch_bounds__(256) silu_mul(float *gate, const float *up, i64 n)
{
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        gate[i] = __fmul_rn(silu_(gate[i]), up[i]);
}

/* Count a finished call where the host looks.  Everything before it in the stream is visible first. */
extern "C" __global__ void raise_flag(u32 *count, volatile u32 *flag)
{
    wait_for_previous();
    u32 n = *count + 1;
    *count = n;
    __threadfence_system();
    *flag = n;
}

/* Read n 16-byte words and nothing else: what the card's memory gives at best, for the placement. */
extern "C" __global__ void __launch_bounds__(512) read_all(const uint4 *p, i64 n, u32 *out)
{
    i64 step = (i64)gridDim.x * blockDim.x;
    u32 x = 0;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += 4 * step) {
        uint4 v[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            v[j] = i + j * step < n ? load_once<0>(p + i + j * step) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int j = 0; j < 4; j++)
            x ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    if (x == 0x5bd1e995) /* never, but the compiler does not know */
        *out = x;
}
