/* The forward pass of a batch of rows, as a sequence of operations run by a team.
 *
 * A row is (sequence, position). Decode, a prefill chunk, a batch of sequences and a verification are
 * the same call with other rows. Which bytes a matrix has, and who else computes a part of an
 * operation, was decided before; nothing here allocates, opens, parses or asks Python.
 */
#ifndef COLI_STEP_H
#define COLI_STEP_H

#include "bench.h"
#include "kernels.h"
#include "team.h"

#define COLI_KV_BLOCK 64 /* positions of one K/V block; also the chunk of attention's sums */

/* Operations of a layer, in order; then the two of the head. An operation's global number is
 * layer * COLI_N_OPS + op; the head follows the last layer. */
enum coli_op {
    COLI_NORM1,    /* RMSNorm of x; quantise */
    COLI_MIX_IN,   /* in_proj_qkvz or qkv_proj -> proj */
    COLI_MIX_CORE, /* DeltaNet or attention: proj -> o */
    COLI_MIX_OUT,  /* quantise o; out_proj or o_proj -> y */
    COLI_NORM2,    /* x += y; RMSNorm; quantise; router, shared-expert gate, top-k */
    COLI_MOE,      /* the experts whose rank is not external -> expert_y; the shared expert -> shared_y */
    COLI_COMBINE,  /* x += sum in rank order + shared expert */
    COLI_N_OPS
};
enum coli_head_op { COLI_FINAL, COLI_LM_HEAD, COLI_N_HEAD_OPS };

typedef struct coli_geometry {
    int32_t hidden_size, vocab_size, n_layers;
    int32_t n_q_heads, n_kv_heads, head_dim, rotary_half;
    int32_t dn_k_heads, dn_v_heads, dn_k_dim, dn_v_dim, conv_taps, conv_channels;
    int32_t n_experts, top_k, moe_dim, shared_dim;
    int32_t kv_f16;
    float eps;
    float attn_scale, q_scale; /* 1/sqrt(head_dim), dk^-0.5 */
} coli_geometry;

/* gate | up | down of `count` experts, stride_bytes apart. data of the three is that of expert 0. */
typedef struct coli_slabs {
    coli_matrix gate, up, down;
    int64_t stride_bytes;
    int32_t count;
} coli_slabs;

typedef struct coli_layer {
    int32_t is_attention;
    int32_t state_index; /* which of the sequence's DeltaNet states, or K/V caches */
    coli_matrix in, out;
    const float *norm1, *norm2; /* 1 + w */
    /* DeltaNet */
    coli_matrix ba;         /* rows: b of every value head, then a */
    const float *conv;      /* (taps, channels) */
    const float *exp_a_log; /* exp(A_log) */
    const float *dt_bias, *dn_norm;
    /* attention */
    const float *q_norm, *k_norm; /* 1 + w */
    /* MoE */
    coli_matrix router, shared_gate;
    coli_slabs shared, experts;
} coli_layer;

typedef struct coli_network {
    coli_geometry g;
    coli_layer *layers;
    coli_matrix embed, head;
    const float *norm; /* 1 + w */
} coli_network;

/* State of one sequence after `position` tokens. NULL where a layer's state is elsewhere: then the core of that layer
 * passes this sequence by, and leaves its rows of o as they were. */
typedef struct coli_seq {
    float **state;    /* per DeltaNet layer: (dn_v_heads, dk, dv) */
    float **conv;     /* per DeltaNet layer: (conv_taps, channels): raw rows, row p % taps is position p */
    void **k_blocks;  /* [attention layer * max_blocks + block]: (n_kv_heads, 64, head_dim) */
    void **v_blocks;
    int64_t max_blocks;
    int64_t position;
} coli_seq;

/* Consecutive rows of one sequence. */
typedef struct coli_part {
    coli_seq *seq;
    int32_t first_row, n_rows;
    int64_t position; /* of first_row */
} coli_part;

typedef struct coli_batch {
    int32_t n_rows, n_parts, n_logits;
    const int32_t *ids;        /* (n_rows) */
    const coli_part *parts;    /* (n_parts) */
    const int32_t *part_of;    /* (n_rows) */
    const int32_t *logit_rows; /* (n_logits) rows whose logits are wanted, ascending */
    const float *rope_cos, *rope_sin; /* (positions, rotary_half) */
    float *logits;                    /* (n_logits, vocab padded to 16) */
} coli_batch;

/* Everything a step writes. Capacities are set by the owner; rows are padded to 16 values. */
typedef struct coli_buffers {
    int32_t max_rows, hidden_pad, proj_pad, mix_pad, moe_pad, shared_pad, vocab_pad;
    float *x, *xn;        /* (rows, hidden_pad) */
    coli_acts acts;       /* of xn */
    float *proj;          /* (rows, proj_pad) */
    float *ba;            /* (rows, 2 * dn_v_heads) */
    float *conv;          /* (rows, conv_channels): q, k, v after convolution, q and k normalised */
    float *q;             /* (rows, n_q_heads * head_dim): after norm and RoPE */
    float *o;             /* (rows, mix_pad) */
    coli_acts acts_o;
    float *y;             /* (rows, hidden_pad): the mixer's output */
    float *router;        /* (rows, n_experts) logits */
    float *shared_gate;   /* (rows) sigmoid of the shared-expert gate */
    int32_t *top_idx;     /* (rows, top_k) */
    float *top_w;         /* (rows, top_k) */
    uint8_t *external;    /* (rows, top_k) 1: somebody else fills expert_y of this rank */
    int32_t *slot_of;     /* (rows, top_k) where a rank's result stands in expert_y */
    int32_t *slot_row;    /* (rows * top_k) row of a slot */
    int32_t *expert_first; /* (n_experts + 1) first slot of an expert, after grouping */
    int32_t *active;      /* experts with at least one slot */
    int32_t n_active, n_slots;
    float *h;             /* (rows * top_k, moe_pad) */
    coli_acts acts_h;     /* by slot */
    float *expert_y;      /* (rows * top_k, hidden_pad) by slot */
    float *shared_h;      /* (rows, shared_pad) */
    coli_acts acts_s;
    float *shared_y;      /* (rows, hidden_pad) */
    int32_t *h_left; /* used as _Atomic: (top_k + 1, groups) blocks of a group of h not done yet (one row only) */
    float *scores;        /* (threads or heads, score_stride) */
    int64_t score_stride; /* positions, a multiple of 64 */
    float *partial;       /* (n_q_heads, chunks, head_dim + 1): o and l of a chunk (split attention) */
    float *thread_max;    /* (threads, heads_pad): the largest score that a thread has seen (split attention) */
    int32_t heads_pad;
    uint8_t *scratch;     /* (threads, scratch_bytes) */
    int64_t scratch_bytes;
} coli_buffers;

typedef struct coli_runner {
    const coli_kernels *k;
    const coli_network *net;
    coli_team *team;
    coli_buffers b;
    coli_batch batch;
    int32_t shared_external;     /* the shared expert is computed elsewhere */
    atomic_int nonfinite;        /* a logit was NaN or infinite */
    int64_t *weight_bytes;       /* (threads, 16): weights read by kernels, by thread (128 bytes apart) */
    coli_read_xor_fn read;       /* the ruler's kernel */
} coli_runner;

/* Rows of one layer that somebody else has chosen the experts of: the MOE operation on its own. */
typedef struct coli_given {
    const float *xn; /* (rows, hidden_size), rows xn_stride apart */
    int64_t xn_stride;
    const int32_t *top_idx;  /* (rows, top_k) */
    const uint8_t *external; /* (rows, top_k) */
} coli_given;

/* Embed the batch's rows into x. */
void coli_embed(coli_runner *r);
/* Run the operations [first, last) with the team, one parallel region. */
void coli_run_ops(coli_runner *r, int first, int last);

/* MOE of a layer for the batch's rows as given, instead of what NORM2 would have left: expert_y, slot_of, shared_y.
 * xn, top_idx and external are overwritten. 0; or 1 where an expert's number is out of range: nothing was done. */
int coli_run_moe(coli_runner *r, int layer, const coli_given *given);

/* The ruler: xor n buffers of the given sizes with the runner's team, cut and walked as a lone row's products walk
 * their matrices (a share a thread, four streams, the same prefetch, the same stealing). */
void coli_read_buffers(coli_runner *r, const uint8_t *const *data, const int64_t *n_bytes, int n);

#endif
