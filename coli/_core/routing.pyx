"""What the router chose, rank by rank: who computes it, how often it was chosen, and where its answer goes.

One pass over a few numbers, for one row as for a whole prompt.  Arrays are read through plain buffers and small lists
are ``array.array``: between the weights of two layers nothing is in the caches, and then eight numbers cost 10 to 30 us
through numpy's indexing, hundreds of misses, and one or two in a loop.
"""

from cpython cimport array
from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from libc.stdint cimport int8_t, int32_t, int64_t, uint8_t
from libc.string cimport memcpy, memset

import array

cdef enum:
    _DEVICES = 127  # what the table's int8 can name

ON_CPU = -1
"""The device of an expert that is on none."""
MAX_DEVICES = _DEVICES

cdef array.array _int32 = array.array("i")


cdef int look(object owner, Py_buffer *view, int flags, char kind, int n_bytes, str name) except -1:
    """Open the buffer of an array of this kind of number, in the letters of ``struct``."""
    cdef char found
    PyObject_GetBuffer(owner, view, flags | PyBUF_FORMAT)
    found = view.format[0] if view.format != NULL else c"B"
    if found == c"l" and kind == c"i":
        found = kind
    if found != kind or view.itemsize != n_bytes:
        text = view.format.decode() if view.format != NULL else "B"
        PyBuffer_Release(view)
        raise TypeError(f"{name} holds {text!r}, not {chr(kind)!r} of {n_bytes} bytes")
    return 0


cdef int require_ints(array.array numbers) except -1:
    if numbers.ob_descr.typecode != c"i":
        raise TypeError(f"an array of {chr(numbers.ob_descr.typecode)!r}, not of 'i'")
    return 0


cdef class Table:
    """Which experts are on devices, and what a layer's routing makes of that.

    device : int8 (layers, experts), ON_CPU or the device that an expert is on.   slot : int32 (layers, experts), of it
    there.  They belong to the caller, who changes them between two calls.   n_devices : MAX_DEVICES at most.
    """

    cdef const int8_t[:, ::1] device
    cdef const int32_t[:, ::1] slot
    cdef int n_devices

    def __init__(self, const int8_t[:, ::1] device, const int32_t[:, ::1] slot, int n_devices):
        if slot.shape[0] != device.shape[0] or slot.shape[1] != device.shape[1] or not 0 <= n_devices <= _DEVICES:
            raise ValueError(f"devices of {device.shape[0]} x {device.shape[1]} experts, slots of {slot.shape[0]} x "
                             f"{slot.shape[1]}, {n_devices} devices")
        self.device, self.slot, self.n_devices = device, slot, n_devices

    def split(self, int layer, top_idx, external, int skip=ON_CPU, taken=None):
        """Deal a layer's routing out to the devices.

        top_idx : int32 (rows, top_k).
        external : uint8 (rows, top_k), written: 1 where a device has the rank, 0 where the CPU must compute it.
        skip : a device that is given nothing.   taken : uint8 (rows, top_k), 1 where a rank is somebody's already;
        another array than external, where such ranks become 1.
        Returns ([(device, slots, rows, ranks)], ranks left to the CPU): of each device that has any, contribution i is
        expert rank ranks[i] of row rows[i], in slot slots[i]; ``array('i')``, row by row in rank order.
        IndexError for a layer or an expert that is not there; nothing was written then.
        """
        cdef Py_buffer chosen, flags, theirs
        look(top_idx, &chosen, PyBUF_C_CONTIGUOUS, c"i", 4, "top_idx")
        try:
            look(external, &flags, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE, c"B", 1, "external")
            try:
                if taken is None:
                    return self.deal(layer, &chosen, &flags, NULL, skip)
                look(taken, &theirs, PyBUF_C_CONTIGUOUS, c"B", 1, "taken")
                try:
                    return self.deal(layer, &chosen, &flags, &theirs, skip)
                finally:
                    PyBuffer_Release(&theirs)
            finally:
                PyBuffer_Release(&flags)
        finally:
            PyBuffer_Release(&chosen)

    cdef int require(self, int layer, const int32_t *experts, int64_t n) except -1:
        cdef int64_t i
        if not 0 <= layer < self.device.shape[0]:
            raise IndexError(f"layer {layer} of {self.device.shape[0]}")
        for i in range(n):
            if not 0 <= experts[i] < self.device.shape[1]:
                raise IndexError(f"expert {experts[i]} of {self.device.shape[1]}")
        return 0

    cdef tuple deal(self, int layer, Py_buffer *chosen, Py_buffer *flags, Py_buffer *theirs, int skip):
        cdef const int32_t *experts = <const int32_t *>chosen.buf
        cdef uint8_t *external = <uint8_t *>flags.buf
        cdef const uint8_t *taken = <const uint8_t *>theirs.buf if theirs != NULL else NULL
        cdef int64_t i, at, top_k, left = 0, n = flags.len
        cdef int64_t[_DEVICES] count
        cdef const int8_t *devices
        cdef const int32_t *places
        cdef int *slots
        cdef int *rows
        cdef int *ranks
        cdef array.array its_slots, its_rows, its_ranks
        cdef int device
        cdef list groups = []
        if chosen.ndim != 2 or chosen.len != 4 * n or (theirs != NULL and (theirs.len != n or taken == external)):
            raise ValueError(f"{n} flags of {chosen.len // 4} ranks in {chosen.ndim} dimensions")
        self.require(layer, experts, n)
        devices, places, top_k = &self.device[layer, 0], &self.slot[layer, 0], chosen.shape[1]
        memset(count, 0, self.n_devices * sizeof(int64_t))
        for i in range(n):
            device = devices[experts[i]]
            if taken != NULL and taken[i]:
                external[i] = 1
            elif 0 <= device < self.n_devices and device != skip:
                external[i] = 1
                count[device] += 1
            else:
                external[i] = 0
                left += 1
        for device in range(self.n_devices):
            if count[device] == 0:
                continue
            its_slots = array.clone(_int32, count[device], False)
            its_rows = array.clone(_int32, count[device], False)
            its_ranks = array.clone(_int32, count[device], False)
            slots, rows, ranks = its_slots.data.as_ints, its_rows.data.as_ints, its_ranks.data.as_ints
            at = 0
            for i in range(n):
                if devices[experts[i]] == device and (taken == NULL or not taken[i]):
                    slots[at], rows[at], ranks[at] = places[experts[i]], <int>(i // top_k), <int>(i % top_k)
                    at += 1
            groups.append((device, its_slots, its_rows, its_ranks))
        return groups, left

    def hits(self, int first_layer, top_idx, int device):
        """How many of these choices are on a device.

        top_idx : int32 (layers, rows, top_k), from first_layer on.
        """
        cdef Py_buffer chosen
        cdef const int32_t *experts
        cdef int64_t layer, i, n, found = 0
        look(top_idx, &chosen, PyBUF_C_CONTIGUOUS, c"i", 4, "top_idx")
        try:
            if chosen.ndim != 3:
                raise ValueError(f"top_idx has {chosen.ndim} dimensions, not 3")
            n = chosen.shape[1] * chosen.shape[2]
            for layer in range(chosen.shape[0]):
                experts = <const int32_t *>chosen.buf + layer * n
                self.require(first_layer + <int>layer, experts, n)
                for i in range(n):
                    found += self.device[first_layer + layer, experts[i]] == device
        finally:
            PyBuffer_Release(&chosen)
        return found

    def residents(self, array.array keys):
        """How many of these keys, layer * experts + expert, are on any device.  keys : array('i')."""
        cdef const int8_t *devices = &self.device[0, 0]
        cdef int64_t i, total = self.device.shape[0] * self.device.shape[1], found = 0
        require_ints(keys)
        for i in range(len(keys)):
            if not 0 <= keys.data.as_ints[i] < total:
                raise IndexError(f"expert {keys.data.as_ints[i]} of {total}")
            found += devices[keys.data.as_ints[i]] >= 0
        return found


def add_keys(array.array keys, int first_layer, top_idx, int n_experts):
    """Append the key, layer * n_experts + expert, of each choice.

    keys : array('i').   top_idx : int32 (rows, top_k) of a layer, or (layers, rows, top_k) of several from it on.
    """
    cdef Py_buffer chosen
    cdef const int32_t *experts
    cdef int32_t *to
    cdef int64_t i, n, per_layer
    require_ints(keys)
    look(top_idx, &chosen, PyBUF_C_CONTIGUOUS, c"i", 4, "top_idx")
    try:
        if not 2 <= chosen.ndim <= 3:
            raise ValueError(f"top_idx has {chosen.ndim} dimensions, neither 2 nor 3")
        experts, n = <const int32_t *>chosen.buf, chosen.len // 4
        per_layer = n // chosen.shape[0] if chosen.ndim == 3 and chosen.shape[0] else max(n, 1)
        for i in range(n):
            if not 0 <= experts[i] < n_experts:
                raise IndexError(f"expert {experts[i]} of {n_experts}")
        i = len(keys)
        array.resize_smart(keys, i + n)
        to = <int32_t *>keys.data.as_ints + i
        for i in range(n):
            to[i] = <int32_t>((first_layer + i // per_layer) * n_experts + experts[i])
    finally:
        PyBuffer_Release(&chosen)


def count(array.array keys, counts):
    """counts[key] += 1 for each key.  counts : float64, by key, of any shape."""
    cdef Py_buffer held
    cdef double *values
    cdef int64_t i, total
    require_ints(keys)
    look(counts, &held, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE, c"d", 8, "counts")
    try:
        values, total = <double *>held.buf, held.len // 8
        for i in range(len(keys)):
            if not 0 <= keys.data.as_ints[i] < total:
                raise IndexError(f"key {keys.data.as_ints[i]} of {total}")
        for i in range(len(keys)):
            values[keys.data.as_ints[i]] += 1.0
    finally:
        PyBuffer_Release(&held)


def number(external, slot_of):
    """Where every rank is external, number them in order, as the CPU does when it computes none.  Whether that is so.

    external : uint8 (rows, top_k).   slot_of : int32 (rows, top_k), written then.
    """
    cdef Py_buffer flags, slots
    cdef int64_t i
    cdef bint is_all = True
    look(external, &flags, PyBUF_C_CONTIGUOUS, c"B", 1, "external")
    try:
        look(slot_of, &slots, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE, c"i", 4, "slot_of")
        try:
            if slots.len != 4 * flags.len:
                raise ValueError(f"{slots.len // 4} slots of {flags.len} ranks")
            for i in range(flags.len):
                is_all = is_all and (<const uint8_t *>flags.buf)[i] != 0
            if is_all:
                for i in range(flags.len):
                    (<int32_t *>slots.buf)[i] = <int32_t>i
        finally:
            PyBuffer_Release(&slots)
    finally:
        PyBuffer_Release(&flags)
    return is_all


def put(expert_y, slot_of, array.array rows, array.array ranks, y):
    """expert_y[slot_of[rows[i], ranks[i]]] = y[i].

    expert_y : float32 (slots, n), rows may lie apart.   slot_of : int32 (rows, top_k).   rows, ranks : array('i').
    y : float32 (contributions, n).   IndexError for a slot that is not there; nothing was written then.
    """
    cdef Py_buffer to, slots, given
    require_ints(rows)
    require_ints(ranks)
    look(expert_y, &to, PyBUF_STRIDES | PyBUF_WRITABLE, c"f", 4, "expert_y")
    try:
        look(slot_of, &slots, PyBUF_C_CONTIGUOUS, c"i", 4, "slot_of")
        try:
            look(y, &given, PyBUF_C_CONTIGUOUS, c"f", 4, "y")
            try:
                put_rows(&to, &slots, rows, ranks, &given)
            finally:
                PyBuffer_Release(&given)
        finally:
            PyBuffer_Release(&slots)
    finally:
        PyBuffer_Release(&to)


cdef int put_rows(Py_buffer *to, Py_buffer *slots, array.array rows, array.array ranks, Py_buffer *given) except -1:
    cdef int64_t i, n = len(rows), slot
    cdef int turn
    if (to.ndim != 2 or slots.ndim != 2 or given.ndim != 2 or to.strides[1] != 4 or to.shape[1] != given.shape[1]
            or len(ranks) != n or given.shape[0] != n):
        raise ValueError(f"{n} rows, {len(ranks)} ranks, {given.shape[0]} answers; or they are not of one width")
    for turn in range(2):  # look first, then write
        for i in range(n):
            if not (0 <= rows.data.as_ints[i] < slots.shape[0] and 0 <= ranks.data.as_ints[i] < slots.shape[1]):
                raise IndexError(f"rank {ranks.data.as_ints[i]} of row {rows.data.as_ints[i]}")
            slot = (<const int32_t *>slots.buf)[rows.data.as_ints[i] * slots.shape[1] + ranks.data.as_ints[i]]
            if not 0 <= slot < to.shape[0]:
                raise IndexError(f"slot {slot} of {to.shape[0]}")
            if turn:
                memcpy(<char *>to.buf + slot * to.strides[0], <char *>given.buf + i * given.shape[1] * 4,
                       given.shape[1] * 4)
    return 0
