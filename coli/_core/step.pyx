# distutils: language = c
"""The forward pass: networks of bound matrices, states of sequences, and the runner that steps them.

Owns memory and pointers; refuses to know files, names of checkpoints, devices and policy.  Whoever binds
a matrix has checked its shape; whoever starts a batch has checked its ids.  The Python half below is
called a few times a step; everything a matrix meets happens in ``src/step.c`` without the GIL.
"""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, int8_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memset
from cpython.mem cimport PyMem_Malloc, PyMem_Free

from coli._core.kernels cimport coli_kernels, coli_matrix, coli_acts, coli_gemm_scratch_bytes, coli_read_xor_fn, reader, table

cdef extern from "<stdlib.h>" nogil:
    int posix_memalign(void **out, size_t alignment, size_t n)

cdef extern from "team.h" nogil:
    ctypedef struct coli_team:
        int n_threads
        int64_t parked_times
    enum: COLI_MAX_THREADS
    coli_team *coli_team_new(int n_threads)
    void coli_team_free(coli_team *t)
    int coli_team_pin(coli_team *t, const int *cpus)
    void coli_team_map(coli_team *t, int *cpu, int *mask_size)
    int coli_team_fp_ok(coli_team *t)
    int coli_team_size(int wanted)
    int coli_has_openmp()

cdef extern from "step.h" nogil:
    enum: COLI_KV_BLOCK, COLI_N_OPS, COLI_N_HEAD_OPS
    ctypedef struct coli_geometry:
        int32_t hidden_size, vocab_size, n_layers
        int32_t n_q_heads, n_kv_heads, head_dim, rotary_half
        int32_t dn_k_heads, dn_v_heads, dn_k_dim, dn_v_dim, conv_taps, conv_channels
        int32_t n_experts, top_k, moe_dim, shared_dim
        int32_t kv_f16
        float eps
        float attn_scale, q_scale
    ctypedef struct coli_slabs:
        coli_matrix gate, up, down
        int64_t stride_bytes
        int32_t count
    ctypedef struct coli_layer:
        int32_t is_attention, state_index
        coli_matrix in_ "in"
        coli_matrix out
        const float *norm1
        const float *norm2
        coli_matrix ba
        const float *conv
        const float *exp_a_log
        const float *dt_bias
        const float *dn_norm
        const float *q_norm
        const float *k_norm
        coli_matrix router, shared_gate
        coli_slabs shared, experts
    ctypedef struct coli_network:
        coli_geometry g
        coli_layer *layers
        coli_matrix embed, head
        const float *norm
    ctypedef struct coli_seq:
        float **state
        float **conv
        void **k_blocks
        void **v_blocks
        int64_t max_blocks
        int64_t position
    ctypedef struct coli_part:
        coli_seq *seq
        int32_t first_row, n_rows
        int64_t position
    ctypedef struct coli_batch:
        int32_t n_rows, n_parts, n_logits
        const int32_t *ids
        const coli_part *parts
        const int32_t *part_of
        const int32_t *logit_rows
        const float *rope_cos
        const float *rope_sin
        float *logits
    ctypedef struct coli_buffers:
        int32_t max_rows, hidden_pad, proj_pad, mix_pad, moe_pad, shared_pad, vocab_pad
        float *x
        float *xn
        coli_acts acts
        float *proj
        float *ba
        float *conv
        float *q
        float *o
        coli_acts acts_o
        float *y
        float *router
        float *shared_gate
        int32_t *top_idx
        float *top_w
        uint8_t *external
        int32_t *slot_of
        int32_t *slot_row
        int32_t *expert_first
        int32_t *active
        int32_t n_active, n_slots
        float *h
        coli_acts acts_h
        float *expert_y
        float *shared_h
        coli_acts acts_s
        float *shared_y
        int32_t *h_left
        float *scores
        int64_t score_stride
        float *partial
        float *thread_max
        int32_t heads_pad
        uint8_t *scratch
        int64_t scratch_bytes
    ctypedef struct coli_runner:
        const coli_kernels *k
        const coli_network *net
        coli_team *team
        coli_buffers b
        coli_batch batch
        int32_t shared_external
        int nonfinite
        int64_t *weight_bytes
        coli_read_xor_fn read
    ctypedef struct coli_given:
        const float *xn
        int64_t xn_stride
        const int32_t *top_idx
        const uint8_t *external
    void coli_embed(coli_runner *r)
    void coli_run_ops(coli_runner *r, int first, int last)
    int coli_run_moe(coli_runner *r, int layer, const coli_given *given)
    void coli_read_buffers(coli_runner *r, const uint8_t *const *data, const int64_t *n_bytes, int n)


KV_BLOCK = COLI_KV_BLOCK
N_OPS = COLI_N_OPS
OPS = ("NORM1", "MIX_IN", "MIX_CORE", "MIX_OUT", "NORM2", "MOE", "COMBINE")
HEAD_OPS = ("FINAL", "LM_HEAD")
MAX_TOP_K = 64
MAX_HEADS_PER_KV = 64
MAX_CONV_TAPS = 16


def has_openmp():
    """Whether this build runs more than one thread."""
    return bool(coli_has_openmp())


cdef int64_t pad(int64_t n, int64_t to) noexcept nogil:
    return (n + to - 1) // to * to


# The collector must not touch it: tp_clear would empty `blocks` before __dealloc__ frees them. It holds only numbers,
# so it is part of no cycle.
@cython.no_gc
cdef class Memory:
    """Zeroed, 128-byte aligned blocks that live as long as their owner."""

    cdef list blocks

    def __cinit__(self):
        self.blocks = []

    cdef void *take(self, size_t n_bytes) except NULL:
        cdef void *p = NULL
        n_bytes = <size_t>pad(<int64_t>n_bytes + 64, 128)  # readers of whole vectors may look past the end
        if posix_memalign(&p, 128, n_bytes):
            raise MemoryError(f"{n_bytes} bytes for a step buffer")
        memset(p, 0, n_bytes)
        self.blocks.append(<size_t>p)
        return p

    def __dealloc__(self):
        for p in self.blocks:
            free(<void *><size_t>p)


cdef class Team:
    """A fixed team of OpenMP threads; made and used by one thread only (the pool belongs to its caller).

    n_threads : how many.   cpus : CPU number for each, -1 to leave it unpinned, or None.
    """

    cdef coli_team *t
    cdef readonly int n_threads

    def __cinit__(self, int n_threads, cpus=None):
        cdef int error
        cdef int[COLI_MAX_THREADS] c
        if not 1 <= n_threads <= COLI_MAX_THREADS:
            raise ValueError(f"n_threads is {n_threads}, must be 1 to {COLI_MAX_THREADS}")
        if cpus is not None and len(cpus) < n_threads:
            raise ValueError(f"{len(cpus)} CPUs for {n_threads} threads")
        n_threads = coli_team_size(n_threads)
        self.t = coli_team_new(n_threads)
        if self.t == NULL:
            raise MemoryError("thread team")
        self.n_threads = n_threads
        if cpus is not None:
            for i in range(n_threads):
                c[i] = cpus[i]
            with nogil:
                error = coli_team_pin(self.t, c)
            if error:
                raise OSError(error, "pinning a worker failed")

    def map(self):
        """[(cpu it runs on, CPUs its mask allows)] by thread, read back from the kernel."""
        cdef int[COLI_MAX_THREADS] cpu
        cdef int[COLI_MAX_THREADS] size
        with nogil:
            coli_team_map(self.t, cpu, size)
        return [(cpu[i], size[i]) for i in range(self.n_threads)]

    @property
    def parked_times(self):
        """How often a worker that lost its core to another process was left out for a second."""
        return self.t.parked_times

    def fp_mode_ok(self):
        """Whether every thread rounds to nearest even and keeps subnormals."""
        cdef int ok
        with nogil:
            ok = coli_team_fp_ok(self.t)
        return bool(ok)

    def __dealloc__(self):
        coli_team_free(self.t)


cdef class Network:
    """Geometry and bound matrices of a model.  Holds a reference to every array it points into.

    geometry : dict of the fields of ``coli_geometry``; is_attention : one bool a layer.
    """

    cdef coli_network n
    cdef Memory memory
    cdef list keep
    cdef readonly int n_layers, n_attention, n_deltanet
    cdef readonly str isa
    cdef const coli_kernels *k

    def __cinit__(self, dict geometry, is_attention, str isa):
        cdef coli_geometry *g = &self.n.g
        self.memory = Memory()
        self.keep = []
        self.isa = isa
        self.k = table(isa)
        g.hidden_size = geometry["hidden_size"]
        g.vocab_size = geometry["vocab_size"]
        g.n_layers = self.n_layers = len(is_attention)
        g.n_q_heads = geometry["n_q_heads"]
        g.n_kv_heads = geometry["n_kv_heads"]
        g.head_dim = geometry["head_dim"]
        g.rotary_half = geometry["rotary_half"]
        g.dn_k_heads = geometry["dn_k_heads"]
        g.dn_v_heads = geometry["dn_v_heads"]
        g.dn_k_dim = geometry["dn_k_dim"]
        g.dn_v_dim = geometry["dn_v_dim"]
        g.conv_taps = geometry["conv_taps"]
        g.conv_channels = 2 * g.dn_k_heads * g.dn_k_dim + g.dn_v_heads * g.dn_v_dim
        g.n_experts = geometry["n_experts"]
        g.top_k = geometry["top_k"]
        g.moe_dim = geometry["moe_dim"]
        g.shared_dim = geometry["shared_dim"]
        g.kv_f16 = geometry["kv_f16"]
        g.eps = geometry["eps"]
        g.attn_scale = geometry["attn_scale"]
        g.q_scale = geometry["q_scale"]
        if g.top_k > MAX_TOP_K or g.n_q_heads // g.n_kv_heads > MAX_HEADS_PER_KV or g.conv_taps > MAX_CONV_TAPS:
            raise ValueError(f"geometry beyond the step's limits: top_k {g.top_k} of {MAX_TOP_K}, query heads a K/V "
                             f"head {g.n_q_heads // g.n_kv_heads} of {MAX_HEADS_PER_KV}, convolution taps "
                             f"{g.conv_taps} of {MAX_CONV_TAPS}")
        self.n.layers = <coli_layer *>self.memory.take(sizeof(coli_layer) * self.n_layers)
        for i, attention in enumerate(is_attention):
            self.n.layers[i].is_attention = bool(attention)
            if attention:
                self.n.layers[i].state_index = self.n_attention
                self.n_attention += 1
            else:
                self.n.layers[i].state_index = self.n_deltanet
                self.n_deltanet += 1

    def matrix(self, str slot, int layer, const uint8_t[::1] data, int64_t offset, int format, int rows, int cols,
               int64_t block_bytes, int n_blocks, int n_groups):
        """Bind one matrix.  slot: embed, head (layer ignored), in, out, ba, router, shared_gate, and the parts of
        the slabs: shared.gate, shared.up, shared.down, experts.gate, ... (those of expert 0)."""
        cdef coli_matrix *m
        cdef coli_layer *l = &self.n.layers[layer]
        if slot == "embed":
            m = &self.n.embed
        elif slot == "head":
            m = &self.n.head
        elif slot == "in":
            m = &l.in_
        elif slot == "out":
            m = &l.out
        elif slot == "ba":
            m = &l.ba
        elif slot == "router":
            m = &l.router
        elif slot == "shared_gate":
            m = &l.shared_gate
        else:
            kind, _, part = slot.partition(".")
            s = &l.shared if kind == "shared" else &l.experts
            m = &s.gate if part == "gate" else &s.up if part == "up" else &s.down
        if offset + block_bytes * n_blocks > data.shape[0]:
            raise ValueError(f"{slot} of layer {layer}: {block_bytes * n_blocks} bytes at {offset} of {data.shape[0]}")
        m.data = &data[offset]
        m.block_bytes, m.rows, m.cols, m.n_blocks, m.n_groups = block_bytes, rows, cols, n_blocks, n_groups
        m.format = format
        self.keep.append(data)

    def slabs(self, str kind, int layer, int64_t stride_bytes, int count):
        """Say how far apart the experts of a layer are ("shared" or "experts")."""
        cdef coli_slabs *s = &self.n.layers[layer].shared if kind == "shared" else &self.n.layers[layer].experts
        s.stride_bytes = stride_bytes
        s.count = count

    def vector(self, str slot, int layer, const float[::1] values):
        """Bind a float32 vector.  slot: norm (layer ignored), norm1, norm2, conv (transposed to taps x channels),
        exp_a_log, dt_bias, dn_norm, q_norm, k_norm."""
        cdef coli_layer *l = &self.n.layers[layer]
        cdef const float *p = &values[0]
        if slot == "norm":
            self.n.norm = p
        elif slot == "norm1":
            l.norm1 = p
        elif slot == "norm2":
            l.norm2 = p
        elif slot == "conv":
            l.conv = p
        elif slot == "exp_a_log":
            l.exp_a_log = p
        elif slot == "dt_bias":
            l.dt_bias = p
        elif slot == "dn_norm":
            l.dn_norm = p
        elif slot == "q_norm":
            l.q_norm = p
        elif slot == "k_norm":
            l.k_norm = p
        else:
            raise ValueError(f"no vector slot {slot}")
        self.keep.append(values)


cdef class Sequence:
    """What the model remembers of one sequence: DeltaNet states, convolution rows, K/V blocks.

    The recurrent part has a fixed size; K/V grows by blocks of 64 positions, all layers of a block together.
    Memory is taken by the first `reserve`, and not for layers whose state is elsewhere (`leave`).
    """

    cdef coli_seq s
    cdef Network net
    cdef Memory memory
    cdef list kv
    cdef uint8_t *elsewhere
    cdef float *recurrent
    cdef int64_t recurrent_floats
    cdef int n_attention
    cdef bint is_begun
    cdef int64_t block_bytes
    cdef readonly int64_t max_positions

    def __cinit__(self, Network net, int64_t max_positions):
        cdef coli_geometry *g = &net.n.g
        self.net = net
        self.memory = Memory()
        self.kv = []
        self.max_positions = max_positions
        self.s.max_blocks = (max_positions + COLI_KV_BLOCK - 1) // COLI_KV_BLOCK
        self.s.state = <float **>self.memory.take(sizeof(void *) * (net.n_deltanet + 1))
        self.s.conv = <float **>self.memory.take(sizeof(void *) * (net.n_deltanet + 1))
        self.s.k_blocks = <void **>self.memory.take(sizeof(void *) * (net.n_attention * self.s.max_blocks + 1))
        self.s.v_blocks = <void **>self.memory.take(sizeof(void *) * (net.n_attention * self.s.max_blocks + 1))
        self.elsewhere = <uint8_t *>self.memory.take(net.n_layers)
        self.block_bytes = <int64_t>g.n_kv_heads * COLI_KV_BLOCK * g.head_dim * (2 if g.kv_f16 else 4)

    @property
    def position(self):
        """Tokens taken in so far."""
        return self.s.position

    @property
    def recurrent_bytes(self):
        """Bytes of DeltaNet states and convolution rows, wherever they are."""
        return 4 * self.net.n_deltanet * self.layer_floats()

    @property
    def kv_bytes(self):
        """Bytes of the K/V blocks reserved so far, wherever they are."""
        return 2 * self.block_bytes * self.net.n_attention * len(self.kv)

    @property
    def memory_bytes(self):
        """Bytes of states and K/V that are here; copies share full blocks."""
        return 4 * self.recurrent_floats + 2 * self.block_bytes * self.n_attention * len(self.kv)

    cdef int64_t layer_floats(self) noexcept:
        cdef coli_geometry *g = &self.net.n.g
        return <int64_t>g.dn_v_heads * g.dn_k_dim * g.dn_v_dim + <int64_t>g.conv_taps * g.conv_channels

    def leave(self, layers):
        """Say, before the first `reserve` or `begin`, which layers' states are elsewhere.  The step passes them by."""
        if self.is_begun:
            raise ValueError("the sequence has begun; its states are here")
        memset(self.elsewhere, 0, self.net.n_layers)
        for layer in layers:
            if not 0 <= layer < self.net.n_layers:
                raise ValueError(f"layer {layer} of {self.net.n_layers}")
            self.elsewhere[<int>layer] = 1

    cdef int take_recurrent(self) except -1:
        cdef coli_geometry *g = &self.net.n.g
        cdef int64_t state = <int64_t>g.dn_v_heads * g.dn_k_dim * g.dn_v_dim
        cdef int64_t conv = <int64_t>g.conv_taps * g.conv_channels
        cdef int64_t here = 0
        cdef int i
        cdef float *p = NULL
        for i in range(self.net.n_layers):
            if not self.elsewhere[i] and not self.net.n.layers[i].is_attention:
                here += 1
        if here:
            p = <float *>self.memory.take(<size_t>(4 * (state + conv) * here))
            self.recurrent, self.recurrent_floats = p, (state + conv) * here
        for i in range(self.net.n_layers):
            if self.elsewhere[i]:
                continue
            if self.net.n.layers[i].is_attention:
                self.n_attention += 1
                continue
            self.s.state[self.net.n.layers[i].state_index] = p
            self.s.conv[self.net.n.layers[i].state_index] = p + state
            p += state + conv
        self.is_begun = True
        return 0

    cdef int put_block(self, int64_t chunk, Memory m, uint8_t *p) except -1:
        """The K/V block of all attention layers that are here."""
        cdef int64_t at
        cdef int i
        for i in range(self.net.n_layers):
            if self.elsewhere[i] or not self.net.n.layers[i].is_attention:
                continue
            at = self.net.n.layers[i].state_index * self.s.max_blocks + chunk
            self.s.k_blocks[at], self.s.v_blocks[at] = p, p + self.block_bytes
            p += 2 * self.block_bytes
        self.kv.append(m)
        return 0

    cdef uint8_t *block_at(self, int64_t chunk) noexcept nogil:
        """Where the memory of a block begins: with the first attention layer that is here."""
        cdef int i
        for i in range(self.net.n_layers):
            if not self.elsewhere[i] and self.net.n.layers[i].is_attention:
                return <uint8_t *>self.s.k_blocks[self.net.n.layers[i].state_index * self.s.max_blocks + chunk]
        return NULL

    def reserve(self, int64_t positions):
        """Take memory for this many positions in all (never for fewer than before)."""
        cdef Memory m
        if positions > self.max_positions:
            raise ValueError(f"{positions} positions, the sequence was made for {self.max_positions}")
        if not self.is_begun:
            self.take_recurrent()
        while self.net.n_attention and len(self.kv) * COLI_KV_BLOCK < positions:
            m = Memory()
            self.put_block(len(self.kv), m, <uint8_t *>m.take(<size_t>(2 * self.n_attention * self.block_bytes)))

    def copy(self):
        """An independent sequence in the same state.  Full blocks are shared: nobody writes to them again."""
        cdef Sequence other = Sequence(self.net, self.max_positions)
        cdef int64_t chunk, full = self.s.position // COLI_KV_BLOCK
        memcpy(other.elsewhere, self.elsewhere, self.net.n_layers)
        if not self.is_begun:
            return other
        other.take_recurrent()
        if self.net.n_attention:
            for chunk in range(full):
                other.put_block(chunk, self.kv[chunk], self.block_at(chunk))
        other.reserve(self.s.position)
        with nogil:
            if self.recurrent_floats:
                memcpy(other.recurrent, self.recurrent, <size_t>(4 * self.recurrent_floats))
            if self.n_attention and self.s.position % COLI_KV_BLOCK:
                memcpy(other.block_at(full), self.block_at(full), <size_t>(2 * self.n_attention * self.block_bytes))
        other.s.position = self.s.position
        return other

    def state(self, int index):
        """(dn_v_heads, dk, dv) float32: a view of one DeltaNet layer's state."""
        cdef coli_geometry *g = &self.net.n.g
        if self.s.state[index] == NULL:
            raise ValueError(f"DeltaNet state {index} is not here")
        return <float[:g.dn_v_heads, :g.dn_k_dim, :g.dn_v_dim]>self.s.state[index]

    def conv(self, int index):
        """(taps, channels) float32: raw rows before the convolution, row p % taps is position p."""
        cdef coli_geometry *g = &self.net.n.g
        if self.s.conv[index] == NULL:
            raise ValueError(f"convolution rows {index} are not here")
        return <float[:g.conv_taps, :g.conv_channels]>self.s.conv[index]

    def kv_block(self, int index, int64_t block, bint values):
        """One K or V block of an attention layer as bytes, (n_kv_heads, 64, head_dim) of float16 or float32."""
        cdef void **p = self.s.v_blocks if values else self.s.k_blocks
        if p[index * self.s.max_blocks + block] == NULL:
            raise ValueError(f"K/V block {block} of attention layer {index} is not here")
        return <uint8_t[:self.block_bytes]>p[index * self.s.max_blocks + block]


cdef class Runner:
    """Steps batches of rows through a network with a team.

    One at a time, always from the thread that made the team.  ``begin`` sets a batch up, ``run`` does a range of
    operations (number = layer * N_OPS + op, the two of the head behind the last layer), ``finish`` moves the
    sequences on.  Between two ``run`` calls the buffers may be read and, for parts computed elsewhere, written.

    generation : changes whenever the buffers move; views of one generation, for as many rows, stay good.
    """

    cdef coli_runner r
    cdef readonly Network net
    cdef readonly Team team
    cdef readonly int generation
    cdef Memory memory, score_memory
    cdef list sequences
    cdef object keep
    cdef coli_part *parts
    cdef int32_t *part_of
    cdef int32_t *ids
    cdef int32_t *logit_rows
    cdef int max_parts

    def __cinit__(self, Network net, Team team):
        self.net = net
        self.team = team
        self.r.net = &net.n
        self.r.k = net.k
        self.r.read = reader(net.k)
        self.r.team = team.t
        self.memory = Memory()
        self.score_memory = Memory()
        self.r.weight_bytes = <int64_t *>PyMem_Malloc(COLI_MAX_THREADS * 128)
        memset(self.r.weight_bytes, 0, COLI_MAX_THREADS * 128)
        self.sequences = []

    def __dealloc__(self):
        PyMem_Free(self.r.weight_bytes)

    cdef int take_acts(self, Memory m, coli_acts *a, int64_t cols, int64_t rows) except -1:
        a.n_groups = <int32_t>((cols + 127) // 128)
        a.stride = <int32_t>rows
        a.q = <int8_t *>m.take(<size_t>(a.n_groups * rows * 128))
        a.scale = <float *>m.take(<size_t>(a.n_groups * rows * 4))
        a.sum = <int32_t *>m.take(<size_t>(a.n_groups * rows * 4))
        return 0

    cdef int grow(self, int64_t rows, int64_t positions) except -1:
        """Make room for batches of this many rows and sequences of this many positions."""
        cdef coli_geometry *g = &self.net.n.g
        # made in a copy and taken over whole: an allocation that fails leaves the old buffers as they are
        cdef coli_buffers fresh = self.r.b
        cdef coli_buffers *b = &fresh
        cdef Memory m
        cdef int32_t *ids
        cdef int32_t *part_of
        cdef int32_t *logit_rows
        cdef coli_part *parts
        cdef int64_t n, widest, per = g.n_q_heads // g.n_kv_heads, stride = pad(positions, COLI_KV_BLOCK)
        cdef int64_t threads = self.team.n_threads
        if rows > b.max_rows:
            m = Memory()
            b.hidden_pad = <int32_t>pad(g.hidden_size, 16)
            b.proj_pad = <int32_t>pad(max(g.conv_channels + g.dn_v_heads * g.dn_v_dim,
                                          (2 * g.n_q_heads + 2 * g.n_kv_heads) * g.head_dim), 16)
            b.mix_pad = <int32_t>pad(max(g.dn_v_heads * g.dn_v_dim, g.n_q_heads * g.head_dim), 16)
            b.moe_pad = <int32_t>pad(g.moe_dim, 128)
            b.shared_pad = <int32_t>pad(g.shared_dim, 128)
            b.vocab_pad = <int32_t>pad(g.vocab_size, 16)
            b.x = <float *>m.take(<size_t>(rows * b.hidden_pad * 4))
            b.xn = <float *>m.take(<size_t>(rows * b.hidden_pad * 4))
            self.take_acts(m, &b.acts, g.hidden_size, rows)
            b.proj = <float *>m.take(<size_t>(rows * b.proj_pad * 4))
            b.ba = <float *>m.take(<size_t>(rows * 2 * g.dn_v_heads * 4))
            b.conv = <float *>m.take(<size_t>(rows * g.conv_channels * 4))
            b.q = <float *>m.take(<size_t>(rows * g.n_q_heads * g.head_dim * 4))
            b.o = <float *>m.take(<size_t>(rows * b.mix_pad * 4))
            self.take_acts(m, &b.acts_o, b.mix_pad, rows)
            b.y = <float *>m.take(<size_t>(rows * b.hidden_pad * 4))
            b.router = <float *>m.take(<size_t>(rows * g.n_experts * 4))
            b.shared_gate = <float *>m.take(<size_t>(rows * 4))
            n = rows * g.top_k
            b.top_idx = <int32_t *>m.take(<size_t>(n * 4))
            b.top_w = <float *>m.take(<size_t>(n * 4))
            b.external = <uint8_t *>m.take(<size_t>n)
            b.slot_of = <int32_t *>m.take(<size_t>(n * 4))
            b.slot_row = <int32_t *>m.take(<size_t>(n * 4))
            b.expert_first = <int32_t *>m.take(<size_t>((g.n_experts + 1) * 4))
            b.active = <int32_t *>m.take(<size_t>(g.n_experts * 4))
            b.h = <float *>m.take(<size_t>(n * b.moe_pad * 4))
            self.take_acts(m, &b.acts_h, g.moe_dim, n)
            b.expert_y = <float *>m.take(<size_t>(n * b.hidden_pad * 4))
            b.shared_h = <float *>m.take(<size_t>(rows * b.shared_pad * 4))
            self.take_acts(m, &b.acts_s, g.shared_dim, rows)
            b.shared_y = <float *>m.take(<size_t>(rows * b.hidden_pad * 4))
            b.h_left = <int32_t *>m.take(<size_t>((g.top_k * (b.moe_pad // 128) + b.shared_pad // 128) * 4))
            # a thread's scratch: decoded blocks of the widest matrix, then `up` of 128 tokens x 128 columns
            # (or a whole `up` vector of a 16-bit expert, or a head)
            widest = max(b.hidden_pad, b.mix_pad, b.moe_pad, b.shared_pad)
            b.scratch_bytes = pad(<int64_t>coli_gemm_scratch_bytes(<int>((widest + 127) // 128)) + 128 * 128 * 4
                                  + widest * 4, 4096)
            b.scratch = <uint8_t *>m.take(<size_t>(threads * b.scratch_bytes))
            b.heads_pad = <int32_t>pad(g.n_q_heads, 32)
            b.thread_max = <float *>m.take(<size_t>(threads * b.heads_pad * 4))
            ids = <int32_t *>m.take(<size_t>(rows * 4))
            part_of = <int32_t *>m.take(<size_t>(rows * 4))
            logit_rows = <int32_t *>m.take(<size_t>(rows * 4))
            parts = <coli_part *>m.take(<size_t>(rows * sizeof(coli_part)))
            b.max_rows = <int32_t>rows
            self.r.b = fresh
            self.ids, self.part_of, self.logit_rows, self.parts = ids, part_of, logit_rows, parts
            self.memory = m
            self.generation += 1
        if stride > b.score_stride:
            stride = max(stride, min(2 * b.score_stride, 1 << 20), 1024)
            m = Memory()
            b.scores = <float *>m.take(<size_t>(max(<int64_t>g.n_q_heads, threads * per) * stride * 4))
            b.partial = <float *>m.take(<size_t>(g.n_q_heads * (stride // COLI_KV_BLOCK) * (g.head_dim + 1) * 4))
            b.score_stride = stride
            self.r.b = fresh
            self.score_memory = m
        return 0

    def begin(self, parts, const int32_t[::1] ids, const float[:, ::1] rope_cos, const float[:, ::1] rope_sin):
        """Set up a batch and embed it.

        parts : [(Sequence, n_rows)], rows of a part are consecutive positions from the sequence's own.
        ids : int32, all rows of all parts.   rope_cos, rope_sin : float32 (positions, rotary_half), far enough.
        """
        cdef coli_batch *batch = &self.r.batch
        cdef Sequence seq
        cdef int32_t row = 0, n, i, k = 0
        cdef int64_t furthest = 0
        for seq, n in parts:
            if seq.net is not self.net:
                raise ValueError("a sequence of another model")
            seq.reserve(seq.s.position + n)
            furthest = max(furthest, seq.s.position + n)
            row += n
        if row != ids.shape[0] or furthest > rope_cos.shape[0]:
            raise ValueError(f"{row} rows for {ids.shape[0]} ids, {furthest} positions for {rope_cos.shape[0]} angles")
        self.grow(row, furthest)
        row = 0
        for seq, n in parts:
            self.parts[k].seq = &seq.s
            self.parts[k].first_row = row
            self.parts[k].n_rows = n
            self.parts[k].position = seq.s.position
            for i in range(n):
                self.part_of[row + i] = k
            row += n
            k += 1
        memcpy(self.ids, &ids[0], <size_t>(4 * row))
        batch.n_rows, batch.n_parts, batch.n_logits = row, k, 0
        batch.ids, batch.parts, batch.part_of = self.ids, self.parts, self.part_of
        batch.rope_cos, batch.rope_sin = &rope_cos[0, 0], &rope_sin[0, 0]
        self.keep = (parts, rope_cos, rope_sin)
        self.r.shared_external = 0
        self.r.nonfinite = 0
        with nogil:
            coli_embed(&self.r)

    def run(self, int first, int last):
        """Do the operations [first, last) in one parallel region."""
        with nogil:
            coli_run_ops(&self.r, first, last)

    def moe(self, int layer, const float[:, :] xn, const int32_t[:, ::1] top_idx, const uint8_t[:, ::1] external,
            bint shared):
        """The experts of one layer for rows that another device has chosen them for, in one parallel region.

        xn : float32 (rows of the batch, hidden), what the experts take.   top_idx : int32 (rows, top_k).
        external : uint8 (rows, top_k), 1 where somebody else computes that rank.
        shared : compute the shared expert too.
        Fills the buffers expert_y, slot_of and shared_y, and overwrites xn, top_idx and external.
        """
        cdef coli_geometry *g = &self.net.n.g
        cdef int n = self.r.batch.n_rows
        cdef int refused
        cdef coli_given given
        if (not 0 <= layer < self.net.n_layers or xn.shape[0] != n or xn.shape[1] != g.hidden_size
                or xn.strides[1] != sizeof(float) or top_idx.shape[0] != n or top_idx.shape[1] != g.top_k
                or external.shape[0] != n or external.shape[1] != g.top_k):
            raise ValueError(f"layer {layer}: xn ({xn.shape[0]}, {xn.shape[1]}), top_idx ({top_idx.shape[0]}, "
                             f"{top_idx.shape[1]}), external ({external.shape[0]}, {external.shape[1]}) for {n} rows")
        given.xn, given.xn_stride = &xn[0, 0], xn.strides[0] // <Py_ssize_t>sizeof(float)
        given.top_idx, given.external = &top_idx[0, 0], &external[0, 0]
        self.r.shared_external = not shared
        with nogil:
            refused = coli_run_moe(&self.r, layer, &given)
        self.r.shared_external = 0
        if refused:
            raise ValueError(f"layer {layer}: an expert beyond {g.n_experts} was chosen")

    def head_begin(self, rows, float[:, ::1] logits):
        """Say which rows' logits are wanted, and where: float32 (>= len(rows), vocabulary padded to 16)."""
        cdef int32_t i, n = <int32_t>len(rows)
        if n > self.r.b.max_rows or logits.shape[0] < n or logits.shape[1] != self.r.b.vocab_pad:
            raise ValueError(f"logits of {n} rows into ({logits.shape[0]}, {logits.shape[1]})")
        for i in range(n):
            self.logit_rows[i] = rows[i]
        self.r.batch.n_logits = n
        self.r.batch.logit_rows = self.logit_rows
        self.r.batch.logits = &logits[0, 0]

    def head(self, rows, float[:, ::1] logits):
        """Logits of the given rows into logits[:len(rows)].  Returns False when one is NaN or infinite."""
        self.head_begin(rows, logits)
        self.run(self.n_ops, self.n_ops + COLI_N_HEAD_OPS)
        return not self.r.nonfinite

    def finish(self):
        """The batch is done: its sequences stand behind their last row."""
        cdef int32_t k
        for k in range(self.r.batch.n_parts):
            self.parts[k].seq.position += self.parts[k].n_rows
        self.keep = None

    @property
    def n_ops(self):
        """Operations of all layers; the head's are not counted."""
        return self.net.n_layers * COLI_N_OPS

    @property
    def weight_bytes(self):
        """Bytes of weights that the kernels have read since the start."""
        cdef int64_t total = 0
        for i in range(COLI_MAX_THREADS):
            total += self.r.weight_bytes[i * 16]
        return total

    @property
    def shared_external(self):
        """Whether the shared expert of the current layer is computed elsewhere (write shared_y)."""
        return bool(self.r.shared_external)

    @shared_external.setter
    def shared_external(self, bint value):
        self.r.shared_external = value

    def buffer(self, str name):
        """A view of a step buffer for the batch's rows: x, xn, proj, o, y, router, top_idx, top_w, external, slot_of,
        shared_gate, shared_y (rows first), expert_y (slots first), head_x and logits (wanted rows first).  Valid
        until the next ``begin``, those of the rows as long as ``generation`` stays."""
        cdef coli_buffers *b = &self.r.b
        cdef coli_geometry *g = &self.net.n.g
        cdef int n = self.r.batch.n_rows
        if name == "x":
            return <float[:n, :b.hidden_pad]>b.x
        if name == "xn":
            return <float[:n, :b.hidden_pad]>b.xn
        if name == "head_x":
            return <float[:self.r.batch.n_logits, :b.hidden_pad]>b.xn
        if name == "logits":
            return <float[:self.r.batch.n_logits, :b.vocab_pad]>self.r.batch.logits
        if name == "proj":
            return <float[:n, :b.proj_pad]>b.proj
        if name == "o":
            return <float[:n, :b.mix_pad]>b.o
        if name == "y":
            return <float[:n, :b.hidden_pad]>b.y
        if name == "router":
            return <float[:n, :g.n_experts]>b.router
        if name == "top_idx":
            return <int32_t[:n, :g.top_k]>b.top_idx
        if name == "top_w":
            return <float[:n, :g.top_k]>b.top_w
        if name == "external":
            return <uint8_t[:n, :g.top_k]>b.external
        if name == "slot_of":
            return <int32_t[:n, :g.top_k]>b.slot_of
        if name == "shared_gate":
            return <float[:n]>b.shared_gate
        if name == "shared_y":
            return <float[:n, :b.hidden_pad]>b.shared_y
        if name == "expert_y":
            return <float[:n * g.top_k, :b.hidden_pad]>b.expert_y
        raise ValueError(f"no buffer {name}")

    def read(self, buffers):
        """Xor uint8 buffers with the team as a lone row's products would walk them: the ruler of ``coli bench``.

        Returns the bytes read (each buffer's whole 64-byte lines).
        """
        cdef int n = <int>len(buffers), i
        cdef const uint8_t[::1] one
        cdef const uint8_t **data = <const uint8_t **>PyMem_Malloc(n * sizeof(void *) + 8)
        cdef int64_t *sizes = <int64_t *>PyMem_Malloc(n * 8 + 8)
        cdef int64_t total = 0
        try:
            for i in range(n):
                one = buffers[i]
                data[i] = &one[0]
                sizes[i] = one.shape[0]
                total += sizes[i] // 64 * 64
            with nogil:
                coli_read_buffers(&self.r, data, sizes, n)
        finally:
            PyMem_Free(data)
            PyMem_Free(sizes)
        return total
