/* Attention between its projections: norm and RoPE, the cache, softmax by chunks of 64 positions, the gate.
 *
 * Rows of a batch belong to parts (struct Part of deltanet.cu).  states[2 * part] and states[2 * part + 1] are the
 * tables of a part's K and V blocks; a block is (kv heads, 64, d) of 64 absolute positions.  d is a multiple of 4.
 *
 * A tile is up to tile_rows rows of one part; its items are the query heads that share a K/V head, row by row.  Scores
 * come first, [chunk][64 positions][items] of each tile and K/V head, with their exact maximum: no running rescale.
 * Where parts have one row each, chunks are then computed apart and added by a last kernel; a tile of several rows
 * walks through its chunks in their order.
 */
#define CHUNK 64      /* positions of a K/V block, and of one sum */
#define CHUNKS_AT_ONCE 64 /* of attention_finish */
#define TILE_ITEMS 32 /* items of one block of attention_rows */
#define ITEM_GROUPS 4 /* groups of items that the warps of a block of attention_scores share */

template <int HALF> DEVICE void kv_store(void *p, i64 i, float v)
{
    if (HALF)
        ((u16 *)p)[i] = float_to_half(v);
    else
        ((float *)p)[i] = v;
}

/* Four keys or values as they are stored. */
template <int HALF> struct Quad {
    typedef uint4 Bits;
};
template <> struct Quad<1> {
    typedef uint2 Bits;
};

DEVICE float4 widen_quad(uint4 v)
{
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}

DEVICE float4 widen_quad(uint2 v)
{
    return make_float4(half_to_float(v.x & 0xffff), half_to_float(v.x >> 16), half_to_float(v.y & 0xffff),
                       half_to_float(v.y >> 16));
}

/* Floats as integers that order alike; 0 is below every number. */
DEVICE u32 score_key(float x)
{
    u32 bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

DEVICE float of_score_key(u32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

struct RowTile {
    int part, first_row, n_rows; /* first_row: of the batch */
    i64 position;                /* of the first row */
};

/* The index-th tile of all parts in turn.  False where there are fewer. */
DEVICE bool find_tile(const Part *parts, int n_parts, int tile_rows, int index, RowTile *tile)
{
    for (int p = 0; p < n_parts; p++) {
        Part part = parts[p];
        int tiles = (part.n_rows + tile_rows - 1) / tile_rows;
        if (index < tiles) {
            int at = index * tile_rows, left = part.n_rows - at;
            *tile = {p, part.first_row + at, left < tile_rows ? left : tile_rows, part.position + at};
            return true;
        }
        index -= tiles;
    }
    return false;
}

/* Positions of chunk c that the row at `position` attends to: at most 64, not positive where there are none. */
DEVICE int attended(i64 position, int c)
{
    i64 left = position + 1 - (i64)c * CHUNK;
    return left < CHUNK ? (int)left : CHUNK;
}

/* Keys or values of one chunk and K/V head on their way, while the kernel before this one still runs.  Those of its row
 * are yet to be written, and a cache line that is fetched too early sees them later: it is only a hint. */
template <int HALF> DEVICE void fetch_chunk(const void *block, int kv, int d)
{
    const int row_bytes = d * (HALF ? 2 : 4);
    const u8 *first = (const u8 *)block + (i64)kv * CHUNK * row_bytes;
    for (int at = threadIdx.x * 128; at < CHUNK * row_bytes; at += blockDim.x * 128)
        fetch_line(first + at);
}

/* Norm and RoPE of one head of one row; k and v go to the cache, maxima are reset.  proj row: query and gate by head,
 * then k, then v.  cos_ and sin_ (rows, half); q (rows, q heads, d).  A warp an item, 4 warps; grid
 * ((q heads + kv heads) * rows / 4); shared: 4 * d floats. */
template <int HALF>
DEVICE void attention_prepare(const float *proj, i64 proj_stride, const float *q_norm, const float *k_norm,
                              const float *cos_, const float *sin_, int half, int n_q, int n_kv, int d, float eps,
                              int n_rows, const Part *parts, const int *part_of, void *const *const *states, float *q,
                              u32 *maxima)
{
    extern __shared__ float head_rows[];
    wait_for_previous();
    let_next_start();
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    i64 item = (i64)blockIdx.x * 4 + warp;
    if (item >= (i64)(n_q + n_kv) * n_rows)
        return;
    int row = item / (n_q + n_kv), head = item % (n_q + n_kv);
    bool is_key = head >= n_q;
    head -= is_key ? n_q : 0;
    float *turned = head_rows + warp * d;
    const float *from = proj + row * proj_stride, *w = is_key ? k_norm : q_norm;
    const float *x = is_key ? from + ((i64)2 * n_q + head) * d : from + (i64)head * 2 * d;
    float p = 0.0f;
#pragma unroll 8
    for (int i = lane; i < d; i += WARP) {
        float v = x[i];
        turned[i] = v;
        p = __fadd_rn(p, __fmul_rn(v, v));
    }
    float r = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(tree32(p), (float)d), eps)));
    for (int i = lane; i < d; i += WARP)
        turned[i] = __fmul_rn(__fmul_rn(turned[i], r), w[i]);
    __syncwarp();
    cos_ += (i64)row * half;
    sin_ += (i64)row * half;
    for (int i = lane; i < half; i += WARP) {
        float a = turned[i], b = turned[i + half];
        turned[i] = __fsub_rn(__fmul_rn(a, cos_[i]), __fmul_rn(b, sin_[i]));
        turned[i + half] = __fadd_rn(__fmul_rn(b, cos_[i]), __fmul_rn(a, sin_[i]));
    }
    __syncwarp();
    if (!is_key) {
        i64 of = (i64)row * n_q + head;
        for (int i = lane; i < d; i += WARP)
            q[of * d + i] = turned[i];
        if (lane == 0)
            maxima[of] = 0;
        return;
    }
    int part = part_of[row];
    i64 position = parts[part].position + (row - parts[part].first_row);
    i64 at = ((i64)head * CHUNK + position % CHUNK) * d;
    const float *v = from + ((i64)2 * n_q + n_kv + head) * d;
    void *k_block = states[2 * part][position / CHUNK], *v_block = states[2 * part + 1][position / CHUNK];
    for (int i = lane; i < d; i += WARP) {
        kv_store<HALF>(k_block, at + i, turned[i]);
        kv_store<HALF>(v_block, at + i, v[i]);
    }
}

/* What attention_scores has staged: queries [item][columns], and keys in quads of 4 columns.  A lane reads its own key,
 * so a key's quads are exchanged by its number: neighbours' equal columns then lie in different banks. */
template <int HALF> struct Staged {
    static const int keys = HALF ? CHUNK : CHUNK / 2, quads = HALF ? 16 : 8; /* quads: of one turn of all banks */
};

template <int HALF> DEVICE int staged_at(int key, int quad, int columns)
{
    return key * (columns / 4) + (quad ^ (key & (Staged<HALF>::quads - 1)));
}

/* The sums of lanes 4r .. 4r + 3 of the 32, for QT items and KT keys of this thread: columns 4r + 32m, m ascending. */
template <int HALF, int QT, int KT>
DEVICE void quad_dots(const float *queries, const typename Quad<HALF>::Bits *keys, int key, int columns, int r,
                      float (&acc)[QT][KT][4])
{
#pragma unroll
    for (int i = 0; i < QT; i++)
#pragma unroll
        for (int j = 0; j < KT; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                acc[i][j][e] = 0.0f;
    const int ahead = QT * KT >= 8 ? 1 : 4; /* loads before their use, as far as registers go */
#pragma unroll ahead
    for (int quad = r; quad < columns / 4; quad += 8) {
        float4 k[KT];
#pragma unroll
        for (int j = 0; j < KT; j++)
            k[j] = widen_quad(keys[staged_at<HALF>(key + WARP * j, quad, columns)]);
#pragma unroll
        for (int i = 0; i < QT; i++) {
            float4 q = *(const float4 *)(queries + i * columns + 4 * quad);
#pragma unroll
            for (int j = 0; j < KT; j++) {
                acc[i][j][0] = __fadd_rn(acc[i][j][0], __fmul_rn(q.x, k[j].x));
                acc[i][j][1] = __fadd_rn(acc[i][j][1], __fmul_rn(q.y, k[j].y));
                acc[i][j][2] = __fadd_rn(acc[i][j][2], __fmul_rn(q.z, k[j].z));
                acc[i][j][3] = __fadd_rn(acc[i][j][3], __fmul_rn(q.w, k[j].w));
            }
        }
    }
}

template <int QT, int KT> DEVICE void add_quads(float (&a)[QT][KT][4], const float (&b)[QT][KT][4])
{
#pragma unroll
    for (int i = 0; i < QT; i++)
#pragma unroll
        for (int j = 0; j < KT; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                a[i][j][e] = __fadd_rn(a[i][j][e], b[i][j][e]);
}

/* The 32-lane dots of QT items and KT keys, all in one thread.  The lanes come in the order in which their tree wants
 * them: r and r + 4 are 16 lanes apart, r and r + 2 eight. */
template <int HALF, int QT, int KT>
DEVICE void dots(const float *queries, const typename Quad<HALF>::Bits *keys, int key, int columns,
                 float (&dot)[QT][KT])
{
    float odd[QT][KT][4], a[QT][KT][4], b[QT][KT][4], c[QT][KT][4];
#pragma unroll 1
    for (int r = 1; r >= 0; r--) {
        quad_dots<HALF, QT, KT>(queries, keys, key, columns, r, a);
        quad_dots<HALF, QT, KT>(queries, keys, key, columns, r + 4, b);
        add_quads(a, b);
        quad_dots<HALF, QT, KT>(queries, keys, key, columns, r + 2, b);
        quad_dots<HALF, QT, KT>(queries, keys, key, columns, r + 6, c);
        add_quads(b, c);
        add_quads(a, b);
        if (r == 1) {
#pragma unroll
            for (int i = 0; i < QT; i++)
#pragma unroll
                for (int j = 0; j < KT; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        odd[i][j][e] = a[i][j][e];
        }
    }
    add_quads(a, odd);
#pragma unroll
    for (int i = 0; i < QT; i++)
#pragma unroll
        for (int j = 0; j < KT; j++)
            dot[i][j] = __fadd_rn(__fadd_rn(a[i][j][0], a[i][j][2]), __fadd_rn(a[i][j][1], a[i][j][3]));
}

/* Scores of one chunk, 4 * QT items of one tile and K/V head, and their part in the maxima (rows, q heads), as score
 * keys.  grid (chunks, kv heads * groups of items, tiles); the warps are ITEM_GROUPS times as many as are needed for
 * the keys that are staged at once, KT a lane.  columns: d rounded up to 64; shared: 4 * QT queries of so many floats
 * and Staged::keys keys of so many.  stride: of a position's items in `scores`. */
template <int HALF, int QT, int KT>
DEVICE void attention_scores(const float *q, const Part *parts, int n_parts, void *const *const *states, int n_q,
                             int n_kv, int d, int columns, float scale, int tile_rows, int first_tile, int max_chunks,
                             int stride, float *scores, u32 *maxima)
{
    extern __shared__ __align__(16) float staged[];
    typedef typename Quad<HALF>::Bits Bits;
    const int KEYS = Staged<HALF>::keys, KEY_WARPS = KEYS / (WARP * KT);
    RowTile tile = {};
    bool found = find_tile(parts, n_parts, tile_rows, first_tile + blockIdx.z, &tile);
    int c = blockIdx.x, per = n_q / n_kv, groups = gridDim.y / n_kv, kv = blockIdx.y / groups;
    int n_items = tile.n_rows * per, item0 = blockIdx.y % groups * (ITEM_GROUPS * QT);
    found = found && item0 < n_items && attended(tile.position + tile.n_rows - 1, c) > 0;
    if (found)
        fetch_chunk<HALF>(states[2 * tile.part][c], kv, d);
    wait_for_previous();
    let_next_start();
    if (!found)
        return;
    const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP, quads = columns / 4;
    Bits *staged_keys = (Bits *)(staged + ITEM_GROUPS * QT * columns);
    const Bits *keys = (const Bits *)((const u8 *)states[2 * tile.part][c] + (i64)kv * CHUNK * d * (HALF ? 2 : 4));
    for (int i = tid; i < ITEM_GROUPS * QT * quads; i += blockDim.x) {
        int item = item0 + i / quads, k = i % quads * 4;
        item = item < n_items ? item : n_items - 1; /* items past the last repeat it; nobody reads their scores */
        i64 of = (i64)(tile.first_row + item / per) * n_q + kv * per + item % per;
        ((float4 *)staged)[i] = k < d ? *(const float4 *)(q + of * d + k) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    int mine = item0 + warp / KEY_WARPS * QT;
    i64 z = (i64)blockIdx.z * n_kv + kv;
    for (int key0 = 0; key0 < CHUNK; key0 += KEYS) {
        if (key0 > 0)
            __syncthreads(); /* the last keys have been used */
#pragma unroll 8
        for (int i = tid; i < KEYS * quads; i += blockDim.x) {
            int key = i / quads, quad = i % quads;
            Bits v = {};
            if (4 * quad < d)
                v = keys[(key0 + key) * (d / 4) + quad];
            staged_keys[staged_at<HALF>(key, quad, columns)] = v;
        }
        __syncthreads();
        float s[QT][KT];
        int key = warp % KEY_WARPS * WARP + lane;
        dots<HALF, QT, KT>(staged + (mine - item0) * columns, staged_keys, key, columns, s);
#pragma unroll
        for (int i = 0; i < QT; i++) {
            int item = mine + i;
            int n = item < n_items ? attended(tile.position + item / per, c) : 0;
            u32 best = 0;
#pragma unroll
            for (int j = 0; j < KT; j++) {
                int t = key0 + key + WARP * j;
                s[i][j] = __fmul_rn(s[i][j], scale);
                u32 of = t < n ? score_key(s[i][j]) : 0;
                best = of > best ? of : best;
                scores[((z * max_chunks + c) * CHUNK + t) * stride + item] = s[i][j];
            }
            best = warp_max(best);
            if (lane == 0 && best)
                atomicMax(maxima + (i64)(tile.first_row + item / per) * n_q + kv * per + item % per, best);
        }
    }
}

#define ONE_KEYS 16 /* keys of a block of attention_scores_one */
#define ONE_ITEMS 2 /* items of a warp */

/* The same for parts of one row each, cut finer: few positions are then many blocks.  A key and an item are two lanes
 * 16 apart, whose sums are the odd and the even quads' of the 32.  grid (chunks * 4, kv heads * groups of 8 items,
 * rows), 4 warps; shared: 8 queries and 16 keys of `columns`. */
template <int HALF>
DEVICE void attention_scores_one(const float *q, const Part *parts, void *const *const *states, int n_q, int n_kv,
                                 int d, int columns, float scale, int max_chunks, int stride, float *scores,
                                 u32 *maxima)
{
    extern __shared__ __align__(16) float staged[];
    typedef typename Quad<HALF>::Bits Bits;
    const int BLOCK_ITEMS = ITEM_GROUPS * ONE_ITEMS;
    int c = blockIdx.x / (CHUNK / ONE_KEYS), key0 = blockIdx.x % (CHUNK / ONE_KEYS) * ONE_KEYS, row = blockIdx.z;
    int per = n_q / n_kv, groups = gridDim.y / n_kv, kv = blockIdx.y / groups;
    int item0 = blockIdx.y % groups * BLOCK_ITEMS;
    int n = attended(parts[row].position, c) - key0; /* keys here; beyond them lies whatever the memory held */
    const Bits *keys = 0;
    if (n > 0) {
        keys = (const Bits *)states[2 * row][c] + ((i64)kv * CHUNK + key0) * (d / 4);
        for (int at = threadIdx.x * 128; at < ONE_KEYS * d * (int)sizeof(Bits) / 4; at += blockDim.x * 128)
            fetch_line((const u8 *)keys + at); /* as fetch_chunk */
    }
    wait_for_previous();
    let_next_start();
    if (n <= 0)
        return;
    const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP, quads = columns / 4;
    Bits *staged_keys = (Bits *)(staged + BLOCK_ITEMS * columns);
    const float *queries = q + ((i64)row * n_q + kv * per) * d;
#pragma unroll 8
    for (int i = tid; i < ONE_KEYS * quads; i += blockDim.x) {
        int key = i / quads, quad = i % quads;
        Bits v = {};
        if (4 * quad < d && key < n)
            v = keys[key * (d / 4) + quad];
        staged_keys[staged_at<HALF>(key, quad, columns)] = v;
    }
#pragma unroll 4
    for (int i = tid; i < BLOCK_ITEMS * quads; i += blockDim.x) {
        int item = item0 + i / quads, k = i % quads * 4;
        item = item < per ? item : per - 1; /* items past the last repeat it; nobody reads their scores */
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (k < d)
            v = *(const float4 *)(queries + (i64)item * d + k);
        ((float4 *)staged)[i] = v;
    }
    __syncthreads();
    int key = lane % ONE_KEYS, r = lane / ONE_KEYS, first = warp * ONE_ITEMS;
    float a[ONE_ITEMS][1][4], b[ONE_ITEMS][1][4], e[ONE_ITEMS][1][4];
    const float *mine = staged + first * columns;
    quad_dots<HALF, ONE_ITEMS, 1>(mine, staged_keys, key, columns, r, a);
    quad_dots<HALF, ONE_ITEMS, 1>(mine, staged_keys, key, columns, r + 4, b);
    add_quads(a, b);
    quad_dots<HALF, ONE_ITEMS, 1>(mine, staged_keys, key, columns, r + 2, b);
    quad_dots<HALF, ONE_ITEMS, 1>(mine, staged_keys, key, columns, r + 6, e);
    add_quads(b, e);
    add_quads(a, b);
#pragma unroll
    for (int i = 0; i < ONE_ITEMS; i++) {
        float sum[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            sum[j] = __fadd_rn(a[i][0][j], __shfl_xor_sync(ALL, a[i][0][j], ONE_KEYS));
        float s = __fmul_rn(__fadd_rn(__fadd_rn(sum[0], sum[2]), __fadd_rn(sum[1], sum[3])), scale);
        int item = item0 + first + i;
        if (r == i % 2)
            scores[((((i64)row * n_kv + kv) * max_chunks + c) * CHUNK + key0 + key) * stride + item] = s;
        u32 best = warp_max(item < per && key < n ? score_key(s) : 0);
        if (lane == 0 && best)
            atomicMax(maxima + (i64)row * n_q + kv * per + item, best);
    }
}

/* p = exp(s - max) of one chunk of one row, its sum, and the sum of p * v.  grid (chunks, kv heads, rows), rows being
 * parts; a warp takes 128 columns of two items at a time.  shared: 64 * stride floats.
 * partial (rows, q heads, chunks, d), sums (rows, q heads, chunks). */
template <int HALF>
DEVICE void attention_values(const float *scores, const u32 *maxima, const Part *parts, void *const *const *states,
                             int n_q, int n_kv, int d, int max_chunks, int stride, float *partial, float *sums)
{
    extern __shared__ __align__(16) float p[];
    typedef typename Quad<HALF>::Bits Bits;
    int c = blockIdx.x, kv = blockIdx.y, row = blockIdx.z, per = n_q / n_kv, n = attended(parts[row].position, c);
    if (n > 0)
        fetch_chunk<HALF>(states[2 * row + 1][c], kv, d);
    wait_for_previous();
    let_next_start();
    if (n <= 0)
        return;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    i64 head0 = (i64)row * n_q + kv * per;
    const float *s = scores + (((i64)row * n_kv + kv) * max_chunks + c) * CHUNK * stride;
    for (int i = threadIdx.x; i < CHUNK * stride; i += blockDim.x) {
        int item = i % stride;
        if (item < per)
            p[i] = i / stride < n ? exp_(__fsub_rn(s[i], of_score_key(maxima[head0 + item]))) : 0.0f;
    }
    __syncthreads();
    for (int item = warp; item < per; item += warps) {
        float l = __fadd_rn(p[lane * stride + item], p[(lane + WARP) * stride + item]);
        l = tree32(l);
        if (lane == 0)
            sums[(head0 + item) * max_chunks + c] = l;
    }
    int pieces = (d + GROUP - 1) / GROUP, column = warp % pieces * GROUP + 4 * lane;
    if (column >= d)
        return;
    i64 v_at = ((i64)kv * CHUNK * d + column) * (HALF ? 2 : 4);
    const Bits *v = (const Bits *)((const u8 *)states[2 * row + 1][c] + v_at);
    for (int item = warp / pieces * 2; item < per; item += warps / pieces * 2) {
        float4 a = make_float4(0.0f, 0.0f, 0.0f, 0.0f), b = a;
        const int AHEAD = HALF ? 32 : 16; /* values under way at once; those past n are zeros, which change no sum */
        for (int t0 = 0; t0 < n; t0 += AHEAD) {
            Bits held[AHEAD];
#pragma unroll
            for (int t = 0; t < AHEAD; t++)
                held[t] = v[(t0 + t < n ? t0 + t : n - 1) * (d / 4)];
#pragma unroll
            for (int t = 0; t < AHEAD; t++) {
                float4 x = t0 + t < n ? widen_quad(held[t]) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                float2 by = *(const float2 *)(p + (t0 + t) * stride + item);
                a.x = __fadd_rn(a.x, __fmul_rn(by.x, x.x));
                a.y = __fadd_rn(a.y, __fmul_rn(by.x, x.y));
                a.z = __fadd_rn(a.z, __fmul_rn(by.x, x.z));
                a.w = __fadd_rn(a.w, __fmul_rn(by.x, x.w));
                b.x = __fadd_rn(b.x, __fmul_rn(by.y, x.x));
                b.y = __fadd_rn(b.y, __fmul_rn(by.y, x.y));
                b.z = __fadd_rn(b.z, __fmul_rn(by.y, x.z));
                b.w = __fadd_rn(b.w, __fmul_rn(by.y, x.w));
            }
        }
        *(float4 *)(partial + ((head0 + item) * max_chunks + c) * d + column) = a;
        if (item + 1 < per)
            *(float4 *)(partial + ((head0 + item + 1) * max_chunks + c) * d + column) = b;
    }
}

/* o = (o / l) * sigmoid(gate), four columns a lane, a warp 128 of one head: quantised where acts are given (d is then a
 * multiple of 128), to o where not. */
DEVICE void finish_columns(float4 v, float l, const float *proj_row, int head, int n_q, int d, int column, int row,
                           float *o, const Acts &a)
{
    if (column < d) {
        float4 gate = *(const float4 *)(proj_row + ((i64)2 * head + 1) * d + column);
        v.x = __fmul_rn(__fdiv_rn(v.x, l), sigmoid_(gate.x));
        v.y = __fmul_rn(__fdiv_rn(v.y, l), sigmoid_(gate.y));
        v.z = __fmul_rn(__fdiv_rn(v.z, l), sigmoid_(gate.z));
        v.w = __fmul_rn(__fdiv_rn(v.w, l), sigmoid_(gate.w));
        if (!a.q)
            *(float4 *)(o + ((i64)row * n_q + head) * d + column) = v;
    }
    if (!a.q)
        return;
    float scale;
    int sum;
    u32 q = quantize_group(v, &scale, &sum);
    store_group(a, row, head * (d / GROUP) + column / GROUP, threadIdx.x % WARP, q, scale, sum);
}

/* Chunks of one row, ascending, then finish_columns.  grid (q heads * pieces of 128 columns, rows), rows being parts;
 * eight warps fetch, one adds. */
extern "C" __global__ void __launch_bounds__(256)
    attention_finish(const float *partial, const float *sums, const float *proj, i64 proj_stride, int n_q, int d,
                     const Part *parts, int max_chunks, float *o, Acts a)
{
    __shared__ __align__(16) float4 staged[CHUNKS_AT_ONCE][WARP];
    __shared__ float of_sums[CHUNKS_AT_ONCE];
    wait_for_previous();
    let_next_start();
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    int row = blockIdx.y, chunks = (int)(parts[row].position / CHUNK) + 1, head = blockIdx.x % n_q;
    int column = blockIdx.x / n_q * GROUP + 4 * lane;
    i64 first = ((i64)row * n_q + head) * max_chunks;
    const float *of = partial + first * d + (column < d ? column : 0);
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float l = 0.0f;
    for (int c0 = 0; c0 < chunks; c0 += CHUNKS_AT_ONCE) {
        int n = chunks - c0 < CHUNKS_AT_ONCE ? chunks - c0 : CHUNKS_AT_ONCE;
#pragma unroll 8
        for (int c = warp; c < n; c += warps)
            staged[c][lane] = *(const float4 *)(of + (i64)(c0 + c) * d);
        if (threadIdx.x < n)
            of_sums[threadIdx.x] = sums[first + c0 + threadIdx.x];
        __syncthreads();
        if (warp == 0)
#pragma unroll 8
            for (int c = 0; c < n; c++) {
                l = __fadd_rn(l, of_sums[c]);
                v = add4(v, staged[c][lane]);
            }
        __syncthreads();
    }
    if (warp == 0)
        finish_columns(v, l, proj + row * proj_stride, head, n_q, d, column, row, o, a);
}

/* One position's values times the p of eight items. */
DEVICE void add_position(float (&acc)[8][4], const float *p, int first, int second, float4 v)
{
    float4 lo = *(const float4 *)(p + 4 * first), hi = *(const float4 *)(p + 4 * second);
    float by[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        acc[i][0] = __fadd_rn(acc[i][0], __fmul_rn(by[i], v.x));
        acc[i][1] = __fadd_rn(acc[i][1], __fmul_rn(by[i], v.y));
        acc[i][2] = __fadd_rn(acc[i][2], __fmul_rn(by[i], v.z));
        acc[i][3] = __fadd_rn(acc[i][3], __fmul_rn(by[i], v.w));
    }
}

/* All chunks of TILE_ITEMS items of one tile and K/V head, one after the other, then finish_columns.
 * grid (kv heads * groups of items, tiles); four warps a piece of 128 columns, eight items each.
 * In shared memory a position's quads of items are exchanged by its number, so that lanes of one quad and different
 * positions do not meet in a bank. */
template <int HALF>
DEVICE void attention_rows(const float *scores, const u32 *maxima, const Part *parts, int n_parts,
                           void *const *const *states, int n_q, int n_kv, int d, int tile_rows, int first_tile,
                           int max_chunks, int stride, const float *proj, i64 proj_stride, float *o, const Acts &a)
{
    __shared__ __align__(16) float p[2][CHUNK][TILE_ITEMS];
    __shared__ float totals[TILE_ITEMS], item_max[TILE_ITEMS];
    typedef typename Quad<HALF>::Bits Bits;
    wait_for_previous();
    let_next_start();
    RowTile tile;
    if (!find_tile(parts, n_parts, tile_rows, first_tile + blockIdx.y, &tile))
        return;
    int per = n_q / n_kv, groups = gridDim.x / n_kv, kv = blockIdx.x / groups;
    int item0 = blockIdx.x % groups * TILE_ITEMS;
    int n_items = tile.n_rows * per - item0;
    if (n_items <= 0)
        return;
    const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP, warps = blockDim.x / WARP;
    int pieces = (d + GROUP - 1) / GROUP, column = warp % pieces * GROUP + 4 * lane, mine = warp / pieces * 8;
    i64 last = tile.position + tile.n_rows - 1, z = (i64)blockIdx.y * n_kv + kv;
    int chunks = (int)(last / CHUNK) + 1;
    if (tid < TILE_ITEMS) {
        int item = item0 + (tid < n_items ? tid : n_items - 1);
        totals[tid] = 0.0f;
        item_max[tid] = of_score_key(maxima[(i64)(tile.first_row + item / per) * n_q + kv * per + item % per]);
    }
    __syncthreads();
    float total[8][4];
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            total[i][e] = 0.0f;
    for (int c = 0; c < chunks; c++) {
        const float *s = scores + (z * max_chunks + c) * CHUNK * stride + item0;
        float(*now)[TILE_ITEMS] = p[c & 1];
        for (int quad = warp; quad < TILE_ITEMS / 4; quad += warps) {
            if (4 * quad >= n_items)
                break;
            float4 lo = *(const float4 *)(s + lane * stride + 4 * quad);
            float4 hi = *(const float4 *)(s + (lane + WARP) * stride + 4 * quad);
            float of[2][4] = {{lo.x, lo.y, lo.z, lo.w}, {hi.x, hi.y, hi.z, hi.w}};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int item = 4 * quad + i, n = item < n_items ? attended(tile.position + (item0 + item) / per, c) : 0;
                float max = item_max[item];
                of[0][i] = lane < n ? exp_(__fsub_rn(of[0][i], max)) : 0.0f;
                of[1][i] = lane + WARP < n ? exp_(__fsub_rn(of[1][i], max)) : 0.0f;
                float l = tree32(__fadd_rn(of[0][i], of[1][i]));
                if (lane == 0)
                    totals[item] = __fadd_rn(totals[item], l);
            }
            int at = (quad ^ (lane & 7)) * 4;
            *(float4 *)&now[lane][at] = make_float4(of[0][0], of[0][1], of[0][2], of[0][3]);
            *(float4 *)&now[lane + WARP][at] = make_float4(of[1][0], of[1][1], of[1][2], of[1][3]);
        }
        __syncthreads();
        if (column < d && mine < n_items) {
            i64 v_at = ((i64)kv * CHUNK * d + column) * (HALF ? 2 : 4);
            const Bits *v = (const Bits *)((const u8 *)states[2 * tile.part + 1][c] + v_at);
            int n = attended(last, c), t = 0, quad = mine / 4; /* past n lies whatever the memory held */
            float acc[8][4];
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    acc[i][e] = 0.0f;
            for (; t + 8 <= n; t += 8) {
                Bits held[8];
#pragma unroll
                for (int u = 0; u < 8; u++)
                    held[u] = v[(t + u) * (d / 4)];
#pragma unroll
                for (int u = 0; u < 8; u++)
                    add_position(acc, now[t + u], quad ^ u, (quad + 1) ^ u, widen_quad(held[u]));
            }
            for (; t < n; t++)
                add_position(acc, now[t], quad ^ (t & 7), (quad + 1) ^ (t & 7), widen_quad(v[t * (d / 4)]));
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    total[i][e] = __fadd_rn(total[i][e], acc[i][e]);
        }
    }
    __syncthreads(); /* for the totals */
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int item = item0 + mine + i, row = tile.first_row + item / per;
        if (mine + i < n_items)
            finish_columns(make_float4(total[i][0], total[i][1], total[i][2], total[i][3]), totals[mine + i],
                           proj + row * proj_stride, kv * per + item % per, n_q, d, column, row, o, a);
    }
}

#define SCORES(NAME, HALF, QT, KT, WARPS, BLOCKS)                                                                      \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)                                                   \
        NAME(const float *q, const Part *parts, int n_parts, void *const *const *states, int n_q, int n_kv, int d,     \
             int columns, float scale, int tile_rows, int first_tile, int max_chunks, int stride, float *scores,       \
             u32 *maxima)                                                                                              \
    {                                                                                                                  \
        attention_scores<HALF, QT, KT>(q, parts, n_parts, states, n_q, n_kv, d, columns, scale, tile_rows, first_tile, \
                                       max_chunks, stride, scores, maxima);                                            \
    }
#define ATTENTION(HALF, NAME)                                                                                          \
    extern "C" __global__ void __launch_bounds__(128) attention_prepare_##NAME(                                        \
        const float *proj, i64 proj_stride, const float *q_norm, const float *k_norm, const float *cos_,               \
        const float *sin_, int half, int n_q, int n_kv, int d, float eps, int n_rows, const Part *parts,               \
        const int *part_of, void *const *const *states, float *q, u32 *maxima)                                         \
    {                                                                                                                  \
        attention_prepare<HALF>(proj, proj_stride, q_norm, k_norm, cos_, sin_, half, n_q, n_kv, d, eps, n_rows, parts, \
                                part_of, states, q, maxima);                                                           \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(128)                                                                  \
        attention_scores_one_##NAME(const float *q, const Part *parts, void *const *const *states, int n_q, int n_kv,  \
                                    int d, int columns, float scale, int max_chunks, int stride, float *scores,        \
                                    u32 *maxima)                                                                       \
    {                                                                                                                  \
        attention_scores_one<HALF>(q, parts, states, n_q, n_kv, d, columns, scale, max_chunks, stride, scores,         \
                                   maxima);                                                                            \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                               \
        attention_values_##NAME(const float *scores, const u32 *maxima, const Part *parts, void *const *const *states, \
                                int n_q, int n_kv, int d, int max_chunks, int stride, float *partial, float *sums)     \
    {                                                                                                                  \
        attention_values<HALF>(scores, maxima, parts, states, n_q, n_kv, d, max_chunks, stride, partial, sums);        \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256, 2) attention_rows_##NAME(                                        \
        const float *scores, const u32 *maxima, const Part *parts, int n_parts, void *const *const *states, int n_q,   \
        int n_kv, int d, int tile_rows, int first_tile, int max_chunks, int stride, const float *proj,                 \
        i64 proj_stride, float *o, Acts a)                                                                             \
    {                                                                                                                  \
        attention_rows<HALF>(scores, maxima, parts, n_parts, states, n_q, n_kv, d, tile_rows, first_tile, max_chunks,  \
                             stride, proj, proj_stride, o, a);                                                         \
    }
/* what the registers hold, which newer compilers fill sooner */
#if __CUDA_ARCH__ >= 1000
#define ROWS_BLOCKS 2
#else
#define ROWS_BLOCKS 3
#endif
SCORES(attention_scores_rows_f32, 0, 4, 1, 4, 1)
SCORES(attention_scores_rows_f16, 1, 4, 2, 4, ROWS_BLOCKS)
ATTENTION(0, f32)
ATTENTION(1, f16)
