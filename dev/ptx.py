#!/usr/bin/env python3
"""ptx.py [options] PROGRAM.cu [ARGUMENT...]: runs a program of dev/cuda as nvcc compiles it for a
GPU, without one.

nvcc makes a library of the host's code and PTX of the kernels. The library is loaded here with
dev/ptx_runtime.cpp in the place of CUDA's runtime, and each launch comes back to this interpreter.
So the program checks the results of its kernels itself, as it would on a GPU, and the interpreter
stops at what a GPU would not have told:

  bounds       an access outside allocated device memory, or outside a shared or local array
  alignment    an address that is no multiple of the access's size, vectors included
  values       a read of shared or device memory that nobody wrote
  races        two threads at the same two bytes, one of them writing, with no barrier between: of a
               block in shared memory, of the whole grid in device memory
  cp.async     a touch of bytes that are still in flight: data is there after wait_group, and for
               others a barrier
  convergence  a barrier, shuffle, vote or matrix instruction without all the lanes that it names

All threads of several blocks go through an instruction at once, as numpy vectors. Threads that took
different ways are run one way after the other: always those that are furthest behind, so that they
meet again where the ways join.

options: --precision bf16|fp32, --source FOLDER (that has llmc/ and the program), --define NAME (for
the preprocessor)
"""

import argparse
import ctypes
import os
import re
import shutil
import subprocess
import sys
import traceback

try:
    import numpy as np
except ImportError:
    print(
        __doc__
        if {"-h", "--help"} & set(sys.argv)
        else "skip: numpy is not installed\n0 passed, 0 failed"
    )
    sys.exit(0)


class Fault(Exception):
    """What a kernel does wrong."""


class Unsupported(Exception):
    """An instruction that this interpreter lacks."""


# ---- PTX as text ---------------------------------------------------------------------------------

TYPES = {
    "u8": np.uint8,
    "s8": np.int8,
    "b8": np.uint8,
    "u16": np.uint16,
    "s16": np.int16,
    "b16": np.uint16,
    "u32": np.uint32,
    "s32": np.int32,
    "b32": np.uint32,
    "f32": np.float32,
    "u64": np.uint64,
    "s64": np.int64,
    "b64": np.uint64,
    "f64": np.float64,
    "pred": np.bool_,
}
STORED = {
    "pred": np.bool_,
    "b16": np.uint16,
    "b32": np.uint32,
    "f32": np.uint32,
    "b64": np.uint64,
    "f64": np.uint64,
}
GAP = 32  # bytes that belong to nobody between two shared arrays


class Instruction:
    def __init__(self, text):
        guard, self.text = re.match(r'(?:@(!?%\w+)\s+)?(.*)', text, re.S).groups()
        self.guard = guard
        self.opcode, _, operands = self.text.replace('\t', ' ').partition(' ')
        self.parts = self.opcode.split('.')
        self.operands = [o.strip() for o in re.findall(r'\{[^}]*\}|\[[^\]]*\]|[^,\s]+', operands)]
        self.type = next((p for p in reversed(self.parts) if p in TYPES), None)


class Block:
    """Instructions without a way in or out but at their ends. A barrier or a warp's instruction
    comes first in its."""
    def __init__(self):
        self.instructions, self.run, self.meets = [], None, None


WARP = {'shfl', 'vote', 'redux', 'mma', 'ldmatrix'}  # all lanes of a warp take part


class Kernel:
    def __init__(self, name, text, shared):
        self.name, self.decoded = name, False
        self.launches = self.executed = 0
        head, body = text.split('{', 1)
        self.symbols = {}  # of parameters, shared and local arrays: their addresses
        self.sizes, self.parameter_bytes = [], 0
        for align, kind, symbol, count in re.findall(
                r'\.param\s+(?:\.align (\d+) )?\.(\w+)\s+(\w+)(?:\[(\d+)\])?', head):
            size = np.dtype(TYPES[kind]).itemsize
            at = -(-self.parameter_bytes // int(align or size)) * int(align or size)
            self.symbols[symbol] = at
            self.sizes.append((at, size * int(count or 1)))
            self.parameter_bytes = at + self.sizes[-1][1]
        self.shared, self.shared_bytes, self.local_bytes = [], 0, 0
        self.dynamic = False
        for align, symbol, size in shared:
            if re.search(rf'\b{symbol}\b', body):
                self.add_shared(symbol, int(size or 0), int(align))
                self.dynamic = not size  # the last one: its launch gives the size
        for symbol, size in re.findall(r'\.local .*?(\w+)\[(\d+)\]', body):
            self.symbols[symbol], self.local_bytes = 0, -(-int(size) // 16) * 16
        self.registers = {}  # name -> number
        self.stored = []     # number -> type
        for kind, name, count in re.findall(r'\.reg \.(\w+)\s+(%\w+)(?:<(\d+)>)?;', body):
            for i in range(int(count or 1)):
                self.registers[f'{name}{i}' if count else name] = len(self.stored)
                self.stored.append(STORED[kind])
        self.blocks = self.parse(body)

    def add_shared(self, symbol, size, align):
        at = -(-(self.shared_bytes + GAP * bool(self.shared)) // align) * align
        self.symbols[symbol] = at
        self.shared.append((at, size))
        self.shared_bytes = at + size

    def parse(self, body):
        body = re.sub(r'//[^\n]*', '', body)
        labels, blocks, new = {}, [], True
        for label, text in re.findall(r'(\$\w+):|([^;{}\s$](?:[^;{}]|\{[^;]*?\})*);', body):
            if label:
                labels[label] = len(blocks)
                new = True
            elif not text.startswith('.'):
                ins = Instruction(text)
                ins.warp = ins.parts[0] in WARP or ins.parts[0] == 'bar'
                if new or ins.warp:
                    blocks.append(Block())
                blocks[-1].instructions.append(ins)
                new = ins.parts[0] in ('bra', 'ret', 'exit', 'bar')
        self.labels = labels
        return blocks


def read_kernels(text):
    """name -> Kernel"""
    starts = list(re.finditer(r'\.entry (\w+)', text))
    if re.search(r'^\s*(\.visible )?\.(global|const|func)', text, re.M):
        raise Unsupported('variables or functions outside of kernels')
    shared = re.findall(
        r"\.shared \.align (\d+) \.b8\s+(\w+)\[(\d*)\]", text
    )  # some are declared outside, also those without a size
    shared.sort(key=lambda array: not array[2])
    return {m[1]: Kernel(m[1], text[m.end():text.index('\n}', m.end())], shared) for m in starts}


# ---- memory --------------------------------------------------------------------------------------

SEVERAL = -1  # readers: threads of several blocks; -2 - b: several threads of block b


class Memory:
    """Bytes, and for each unit of two bytes who wrote and who read it last, and in which era: a
    block's eras are divided by its barriers. Eras of earlier launches are smaller."""
    def __init__(self, data, checked=True):
        n = (len(data) + 1) // 2
        self.data, self.checked = data, checked
        self.exists, self.filled = np.zeros(n, bool), np.zeros(n, bool)
        self.flying = None  # units that cp.async has yet to write
        if checked:
            self.writer, self.written = np.zeros(n, np.int32), np.zeros(n, np.int32)
            self.reader, self.read = np.zeros(n, np.int32), np.zeros(n, np.int32)

    def mark(self, at, size, exists, filled):
        self.exists[at // 2:(at + size + 1) // 2] = exists
        self.filled[at // 2:(at + size + 1) // 2] = filled

    def touch(self, m, at, size, write, fly=False):
        """Checks an access of the running threads to `size` bytes at each address, and notes it.
        Returns the units."""
        wrong = at % size != 0 if size > 1 else None
        if wrong is not None and wrong.any():
            m.blame(wrong, at, f'misaligned: no multiple of {size}')
        wrong = (at < 0) | (at > len(self.data) - size)
        if wrong.any():
            m.blame(wrong, at, f'out of bounds: {size} bytes')
        wrong = ~(self.exists[at >> 1] & self.exists[(at + size - 1) >> 1])
        if wrong.any():
            m.blame(wrong, at, f'out of bounds: {size} bytes')
        units = (at >> 1)[:, None] + np.arange(max(1, size // 2))
        if self.flying is not None:
            wrong = self.flying[units].any(1)
            if wrong.any():
                m.blame(wrong, at, 'bytes that a cp.async has yet to bring')
        if not write:
            wrong = ~self.filled[units].all(1)
            if wrong.any():
                m.blame(wrong, at, 'read of what nobody wrote')
        if self.checked:
            self.order(m, at, units, write)
        if write:
            self.filled[units] = not fly
            if fly:
                if self.flying is None:
                    self.flying = np.zeros(len(self.exists), bool)
                self.flying[units] = True
        return units

    def order(self, m, at, units, write):
        """Races: an earlier access of another thread, one of the two a write, and no barrier of
        their block between."""
        who, era = m.who()[:, None], m.era[m.sel][:, None]
        block, start = who // m.threads, m.start
        writer, written = self.writer[units], self.written[units]
        recent = written >= start
        if recent.any():
            wrong = recent & (writer != who) & ((writer // m.threads != block) | (written >= era))
            if wrong.any():
                m.blame(
                    wrong.any(1),
                    at,
                    f'race: {"writes" if write else "reads"} what another thread wrote, '
                    "and no barrier is between",
                    writer[wrong][0],
                )
        reader, read = self.reader[units], self.read[units]
        recent = read >= start
        of_block = np.where(reader >= 0, reader // m.threads, -2 - reader)
        if write:
            wrong = recent & (reader != who) & ((of_block != block) | (read >= era))
            if wrong.any():
                m.blame(
                    wrong.any(1),
                    at,
                    "race: writes what another thread read, and no barrier is between",
                    reader[wrong][0],
                )
            self.writer[units] = who
            wrong = self.writer[units] != who
            if wrong.any():
                m.blame(
                    wrong.any(1),
                    at,
                    "race: two threads write at once",
                    self.writer[units][wrong][0],
                )
            self.written[units] = era
        else:
            old = ~recent | ((of_block == block) & (read < era)) | (reader == who)
            now = np.where(old, who, np.where(of_block == block, -2 - block, SEVERAL)).astype(
                np.int32
            )
            self.reader[units], self.read[units] = now, era
            clash = self.reader[units] != now  # of several threads at once the last one is noted
            if clash.any():
                u, b = units[clash], np.broadcast_to(block, units.shape)[clash]
                self.reader[u] = -2 - b
                twice = self.reader[u] != -2 - b
                self.reader[u[twice]] = SEVERAL

    def get(self, at, kind):
        return self.data.view(kind)[at // np.dtype(kind).itemsize]

    def put(self, at, values):
        self.data.view(values.dtype)[at // values.dtype.itemsize] = values


# ---- a launch ------------------------------------------------------------------------------------

ALL = slice(None)
BATCH = 4096  # threads at once, in whole blocks


class Machine:
    """Some blocks of a launch: a number of threads, each row of `registers` has a value for
    each."""
    def __init__(self, kernel, device, grid, block, parameters, start, first, count):
        self.kernel, self.device, self.grid, self.block = kernel, device, grid, block
        self.parameters, self.start = parameters, start
        real = block[0] * block[1] * block[2]
        self.threads = -(-real // 32) * 32  # of a block; those beyond the real ones never start
        n = self.n = self.threads * count
        self.registers = [np.zeros(n, kind) for kind in kernel.stored]
        self.thread = np.arange(n)
        self.number = (self.thread % self.threads).astype(np.uint32)
        self.ids = (self.thread + first * self.threads).astype(np.int32)
        self.blocks = first + self.thread // self.threads
        self.era = np.full(n, start, np.int32)
        self.alive = self.number < real
        self.waits, self.stalled = np.zeros(n, bool), np.zeros(n, bool)
        self.pc = np.zeros(n, np.int32)
        self.sel = ALL
        self.copies, self.committed = [], np.zeros(n, np.int64)
        self.block_shared = -(-kernel.shared_bytes // 16) * 16 + GAP
        self.shared = Memory(np.full(self.block_shared * count, 0xFF, np.uint8))
        self.local = Memory(np.full(kernel.local_bytes * n, 0xFF, np.uint8), False)
        self.local.mark(0, kernel.local_bytes * n, True, False)
        for b in range(count):
            for at, bytes_ in kernel.shared:
                self.shared.mark(b * self.block_shared + at, bytes_, True, False)
        self.shared_base = self.thread // self.threads * self.block_shared
        self.local_base = self.thread * kernel.local_bytes

    def who(self):
        return self.ids[self.sel]

    def blame(self, wrong, at, what, other=None):
        """Stops at the first of the running threads that is wrong."""
        t = int(np.arange(self.n)[self.sel][wrong][0])
        where = int(at[wrong][0])
        who = f'block {self.blocks[t]}, thread {self.number[t]}, address {where:#x}'
        if other is not None and other >= 0:
            who += f'; the other: block {other // self.threads}, thread {other % self.threads}'
        raise Fault(f'{what} ({who})')

    def run(self):
        blocks, executed, end = self.kernel.blocks, 0, len(self.kernel.blocks)
        while True:
            ready = self.alive & ~self.waits
            if not ready.any():
                return executed
            able = ready & ~self.stalled
            last = not able.any()  # nobody else can come: the next meeting must succeed
            pcs = np.where(ready if last else able, self.pc, end)
            at = int(pcs.min())
            chosen = np.flatnonzero(pcs == at)
            self.sel = ALL if len(chosen) == self.n else chosen
            pcs[chosen] = end
            behind = int(pcs.min())  # where the next of the others are
            while at is not None:
                block = blocks[at]
                if block.meets and not block.meets(self, last):
                    self.pc[chosen], self.stalled[chosen] = at, True
                    break
                executed += len(chosen) * len(block.run)
                for self.at, step in enumerate(block.run):
                    step(self)
                self.stalled[:] = False
                at = block.end(self)
                if at is not None and at >= behind:
                    self.pc[chosen] = at
                    break

    # Ends of blocks: each returns the next block of all running threads, or None if self.pc has it.
    def branch(self, condition, there, here):
        if condition.all():
            return there
        if not condition.any():
            return here
        self.pc[self.sel] = np.where(condition, there, here)
        return None

    def leave(self):
        self.alive[self.sel] = False
        self.open_barriers()
        return None

    def barrier(self, here):
        if self.sel is ALL:
            self.era += 1
            return here
        self.waits[self.sel], self.pc[self.sel] = True, here
        self.open_barriers()
        return None

    def open_barriers(self):
        waits, alive = self.waits.reshape(-1, self.threads), self.alive.reshape(-1, self.threads)
        full = waits.any(1) & (waits == alive).all(1)
        for b in np.flatnonzero(full):
            part = slice(b * self.threads, (b + 1) * self.threads)
            places = np.unique(self.pc[part][self.alive[part]])
            if len(places) > 1:
                raise Fault(f'divergent barrier: threads of a block wait at {len(places)} barriers')
            self.waits[part] = False
            self.era[part] += 1

    def together(self, mask, last, text):
        """True if all lanes that the running threads name in their masks are running with them."""
        present = np.zeros(self.n, bool)
        present[self.sel] = True
        bits = (present.reshape(-1, 32).astype(np.int64) << np.arange(32)).sum(1)
        missing = mask & ~np.repeat(bits, 32)[self.sel]
        if not missing.any():
            return True
        if last:
            t = int(self.thread[self.sel][missing != 0][0])
            raise Fault(
                f"lanes missing: mask {int(missing[missing != 0][0]):#010x} "
                f"(block {self.blocks[t]}, thread "
                f"{self.number[t]})\n    at {text}"
            )
        return False


# ---- instructions --------------------------------------------------------------------------------

def index_of(m):
    return m.thread[m.sel]


def register(kernel, name, kind):
    """A function that gives the running threads' values of a register as a type."""
    i = kernel.registers[name]
    stored = np.dtype(kernel.stored[i])
    if stored == kind:
        return lambda m: m.registers[i][m.sel]
    if stored.itemsize == np.dtype(kind).itemsize:
        return lambda m: m.registers[i][m.sel].view(kind)
    return lambda m: m.registers[i][m.sel].astype(kind)  # the low bits


def special(name):
    """%tid.x and its like."""
    name, _, axis = name[1:].partition('.')
    axis = 'xyz'.find(axis) if axis else 0

    def along(number, sizes):
        return number // int(np.prod(sizes[:axis], dtype=np.int64)) % sizes[axis]
    return {'tid': lambda m: along(m.number[m.sel], m.block).astype(np.uint32),
            'ctaid': lambda m: along(m.blocks[m.sel], m.grid).astype(np.uint32),
            'ntid': lambda m: np.uint32(m.block[axis]),
            'nctaid': lambda m: np.uint32(m.grid[axis]),
            'laneid': lambda m: m.number[m.sel] % np.uint32(32)}.get(name)


def source(kernel, text, kind):
    """A function that gives the values of an operand as a type."""
    kind = np.dtype(kind)
    if text in kernel.registers:
        return register(kernel, text, kind)
    if text.startswith('%'):
        get = special(text)
        if not get:
            raise Unsupported(text)
        return lambda m: np.asarray(get(m)).astype(kind)
    if text in kernel.symbols:
        value = kind.type(kernel.symbols[text])
        return lambda m: value
    if text[:2] in ('0f', '0F'):
        value = np.array(int(text[2:], 16), np.uint32).view(np.float32)[()]
    elif text[:2] in ('0d', '0D'):
        value = np.array(int(text[2:], 16), np.uint64).view(np.float64)[()]
    else:
        bits = 8 * kind.itemsize
        value = np.array(int(text, 0) & ((1 << bits) - 1), f'u{kind.itemsize}').view(kind)[()]
    return lambda m: value


def destination(kernel, text):
    """A function that gives the running threads a new value of a register. Narrow integers are
    extended."""
    if text in ('_', None):
        return lambda m, value: None
    i = kernel.registers[text]
    stored = np.dtype(kernel.stored[i])

    def put(m, value):
        value = np.asarray(value)
        if value.dtype.itemsize != stored.itemsize:
            value = value.astype(f'{"i" if value.dtype.kind == "i" else "u"}{stored.itemsize}')
        m.registers[i][m.sel] = value if value.dtype == stored else value.view(stored)
    return put


def vector(text):
    return [t.strip() for t in text.strip('{}').split(',')] if text.startswith('{') else [text]


def wide(kind):
    return np.dtype(f'{np.dtype(kind).kind}{2 * np.dtype(kind).itemsize}')


def fused(a, b, c):
    """a b + c with one rounding: exact in double but for ties that are hit by chance."""
    if np.result_type(a) == np.float64:
        return (np.longdouble(1) * a * b + c).astype(np.float64)
    return (a.astype(np.float64) * b + c).astype(np.float32)


def rounded(exact, mode):
    """float64 to float32 downward (m), upward (p) or toward zero (z)."""
    near = exact.astype(np.float32)
    low, high = near > exact, near < exact
    if mode == 'z':
        low, high = low & (near > 0), high & (near < 0)
    near = np.where(low & (mode != 'p'), np.nextafter(near, np.float32(-np.inf)), near)
    return np.where(high & (mode != 'm'), np.nextafter(near, np.float32(np.inf)), near)


def shift_left(a, b):
    bits = 8 * np.result_type(a).itemsize
    return np.where(b < bits, a << np.minimum(b, bits - 1).astype(a.dtype), a.dtype.type(0))


def shift_right(a, b):
    bits = 8 * np.result_type(a).itemsize
    shifted = a >> np.minimum(b, bits - 1).astype(a.dtype)
    return shifted if a.dtype.kind == 'i' else np.where(b < bits, shifted, a.dtype.type(0))


def divide(a, b):
    if np.result_type(a).kind == 'f':
        return a / b
    none = b == 0
    b = np.where(none, b.dtype.type(1), b)
    quotient = np.abs(a) // np.abs(b) * np.sign(a) * np.sign(b) if a.dtype.kind == 'i' else a // b
    return np.where(none, a.dtype.type(0) - a.dtype.type(1), quotient).astype(a.dtype)


def high_product(a, b):
    return (a.astype(wide(a.dtype)) * b >> 8 * a.dtype.itemsize).astype(a.dtype)


def pick_bytes(a, b, selector):
    """prmt: each nibble of the selector names a byte of b:a, or its sign."""
    both = b.astype(np.uint64) << np.uint64(32) | a
    result = np.zeros_like(a)
    for i in range(4):
        nibble = selector >> np.uint32(4 * i)
        byte = both >> (np.uint64(8) * (nibble & np.uint32(7)).astype(np.uint64)) & np.uint64(255)
        byte = np.where(
            nibble & np.uint32(8),
            np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0)),
            byte,
        )
        result = result | byte.astype(np.uint32) << np.uint32(8 * i)
    return result


def insert_bits(a, b, position, length):
    mask = (shift_left(np.ones_like(b), length) - b.dtype.type(1))
    return b & ~shift_left(mask, position) | shift_left(a & mask, position)


def no_subnormal(x):
    return np.where(np.abs(x) < np.float32(1.17549435e-38), x * np.float32(0), x)


def bfloat16(x):
    """The bits of float32s rounded to nearest, ties to even."""
    bits = x.view(np.uint32)
    up = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return np.where(np.isnan(x), np.uint32(0x7FFF), up >> np.uint32(16))


COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}

# name -> function of the sources, which all have the instruction's type; these are others
SIMPLE = {
    "add": np.add,
    "sub": np.subtract,
    "div": divide,
    "rem": lambda a, b: a - divide(a, b) * b,
    "neg": np.negative,
    "abs": np.abs,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "shl": shift_left,
    "shr": shift_right,
    "fma": fused,
    "mov": lambda a: a,
    "selp": lambda a, b, p: np.where(p, a, b),
    "prmt": pick_bytes,
    "bfi": insert_bits,
    "copysign": lambda a, b: np.copysign(b, a),
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda a: 1 / a,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "popc": lambda a: np.bitwise_count(a).astype(np.uint32),
}
SOURCES = {
    ("shl", 1): np.uint32,
    ("shr", 1): np.uint32,
    ("selp", 2): np.bool_,
    ("bfi", 2): np.uint32,
    ("bfi", 3): np.uint32,
}


def arithmetic(kernel, ins):
    name, parts, kind = ins.parts[0], ins.parts, TYPES[ins.type]
    operands = ins.operands[1:]
    gets = [source(kernel, t, SOURCES.get((name, i), kind)) for i, t in enumerate(operands)]
    put = destination(kernel, ins.operands[0])
    real = np.dtype(kind).kind == 'f'
    work = SIMPLE.get(name)
    if name in ('min', 'max'):
        work = {'min': np.fmin, 'max': np.fmax}[name]  # of a NaN and a number: the number
    elif name == 'mul':
        work = high_product if 'hi' in parts else np.multiply
    elif name == 'mad':
        work = lambda a, b, c: (high_product(a, b) if 'hi' in parts else a * b) + c
    if 'wide' in parts:
        to = wide(kind)
        if name == 'mad':
            gets[2] = source(kernel, operands[2], to)
        work = (
            (lambda a, b: a.astype(to) * b)
            if name == "mul"
            else (lambda a, b, c: a.astype(to) * b + c)
        )
    mode = next((p[1] for p in parts if p in ('rm', 'rp', 'rz')), None)
    if mode and real:
        if kind != np.float32 or name not in ('add', 'sub', 'mul', 'fma'):
            raise Unsupported(ins.opcode)
        simple = {'fma': lambda a, b, c: a * b + c}.get(name, work)
        work = lambda *x: rounded(simple(*(np.asarray(v, np.float64) for v in x)), mode)
    if 'ftz' in parts:
        flushed = work
        work = lambda *x: no_subnormal(flushed(*map(no_subnormal, x)))
    if work is None or 'cc' in parts:
        raise Unsupported(ins.opcode)
    if len(gets) == 1:
        one, = gets
        return lambda m: put(m, work(one(m)))
    if len(gets) == 2:
        one, two = gets
        return lambda m: put(m, work(one(m), two(m)))
    return lambda m: put(m, work(*[get(m) for get in gets]))


def move(kernel, ins):
    """mov, also of a pair into one register and back."""
    to, what = ins.operands
    if not to.startswith('{') and not what.startswith('{'):
        return arithmetic(kernel, ins)
    size = np.dtype(TYPES[ins.type]).itemsize
    many = vector(to if to.startswith('{') else what)
    part = np.dtype(f'u{size // len(many)}')
    bits = 8 * part.itemsize
    if to.startswith('{'):
        get, puts = source(kernel, what, f'u{size}'), [destination(kernel, t) for t in many]

        def apart(m):
            value = get(m)
            for i, put in enumerate(puts):
                put(m, (value >> value.dtype.type(bits * i)).astype(part))
        return apart
    gets, put = [source(kernel, t, part) for t in many], destination(kernel, to)

    def join(m):
        value = 0
        for i, get in enumerate(gets):
            value = value | get(m).astype(f'u{size}') << np.dtype(f'u{size}').type(bits * i)
        put(m, value)
    return join


def compare(kernel, ins):
    test, kind = ins.parts[1], TYPES[ins.type]
    if len(ins.operands) != 3 or '|' in ins.operands[0]:
        raise Unsupported(ins.opcode)
    put, a, b = destination(kernel, ins.operands[0]), *(
        source(kernel, t, kind) for t in ins.operands[1:]
    )
    if np.dtype(kind).kind == "f" and test in (
        "equ",
        "neu",
        "ltu",
        "leu",
        "gtu",
        "geu",
    ):  # also true of a NaN
        no = {
            "equ": np.not_equal,
            "neu": np.equal,
            "ltu": np.greater_equal,
            "leu": np.greater,
            "gtu": np.less_equal,
            "geu": np.less,
        }[test]
        if test == 'neu':
            return lambda m: put(m, np.not_equal(a(m), b(m)))
        if test == 'equ':
            return lambda m: put(m, ~((a(m) < b(m)) | (a(m) > b(m))))
        return lambda m: put(m, ~no(a(m), b(m)))
    if test in ('num', 'nan'):
        return lambda m: put(m, (np.isnan(a(m)) | np.isnan(b(m))) == (test == 'nan'))
    work = COMPARE[test]
    if np.dtype(kind).kind == 'f' and test == 'ne':  # false of a NaN
        return lambda m: put(m, (a(m) < b(m)) | (a(m) > b(m)))
    return lambda m: put(m, work(a(m), b(m)))


def convert(kernel, ins):
    parts = ins.parts[1:]
    if parts[-2:] in (['bf16', 'f32'], ['bf16x2', 'f32']):
        put, gets = destination(kernel, ins.operands[0]), [
            source(kernel, t, np.float32) for t in ins.operands[1:]
        ]
        if 'rn' not in parts:
            raise Unsupported(ins.opcode)
        if len(gets) == 1:
            return lambda m: put(m, bfloat16(gets[0](m)).astype(np.uint16))
        return lambda m: put(m, bfloat16(gets[0](m)) << np.uint32(16) | bfloat16(gets[1](m)))
    if parts[-1] == 'bf16' or 'f16' in parts:
        raise Unsupported(ins.opcode)
    to, of = np.dtype(TYPES[parts[-2]]), np.dtype(TYPES[parts[-1]])
    get, put = source(kernel, ins.operands[1], of), destination(kernel, ins.operands[0])
    modes = parts[:-2]
    whole = {'rzi': np.trunc, 'rni': np.rint, 'rmi': np.floor, 'rpi': np.ceil}
    steps = [whole[p] for p in modes if p in whole]
    if 'sat' in modes:
        steps.append(
            lambda x: np.fmin(np.fmax(np.where(np.isnan(x), of.type(0), x), of.type(0)), of.type(1))
        )
    if of.kind == 'f' and to.kind != 'f':
        least, most = np.iinfo(to).min, np.iinfo(to).max
        steps.append(lambda x: np.where(np.isnan(x), 0, x).astype(np.longdouble).clip(least, most))
    if set(modes) & {'rz', 'rm', 'rp'}:
        raise Unsupported(ins.opcode)

    def work(m):
        x = get(m)
        for step in steps:
            x = step(x)
        put(m, x.astype(to))
    return work


WINDOW = {
    "shared": np.uint64(1 << 56),
    "local": np.uint64(2 << 56),
    "global": np.uint64(0),
}  # generic addresses


def convert_address(kernel, ins):
    """cvta: an address of a space to a generic one, or back."""
    offset = WINDOW[ins.parts[2 if 'to' in ins.parts else 1]]
    put, get = destination(kernel, ins.operands[0]), source(kernel, ins.operands[1], np.uint64)
    return lambda m: put(m, get(m) - offset if 'to' in ins.parts else get(m) + offset)


def place(kernel, text, space):
    """A function that gives a memory and the running threads' places in it that [register + offset]
    names."""
    base, _, offset = text.strip('[]').partition('+')
    get, offset = source(kernel, base, np.uint64), int(offset or 0)

    def inside(m, space, address):
        if space == 'global':
            return m.device, (address - m.device.base).view(np.int64) + offset
        memory, size, bases = {'shared': (m.shared, m.block_shared, m.shared_base),
                               'local': (m.local, kernel.local_bytes, m.local_base)}[space]
        at = np.broadcast_to((address - WINDOW[space]).view(np.int64) + offset, index_of(m).shape)
        wrong = (at < 0) | (at >= size)
        if wrong.any():
            m.blame(wrong, at, f'out of bounds of {space} memory')
        return memory, at + bases[m.sel]

    def named(m):
        return inside(m, space, get(m) + WINDOW[space])

    def generic(m):
        address = get(m)
        window = np.unique(address >> np.uint64(56))
        if len(window) != 1:
            raise Unsupported('generic addresses of two spaces at once')
        return inside(m, ['global', 'shared', 'local'][int(window[0])], address)
    return named if space else generic


def access(kernel, ins):
    """ld and st."""
    store = ins.parts[0] == 'st'
    space = next((p for p in ins.parts if p in ('global', 'shared', 'local', 'param')), None)
    address, values = ins.operands if store else ins.operands[::-1]
    kind = np.dtype(TYPES[ins.type])
    names = vector(values)
    size = kind.itemsize * len(names)
    if space == 'param':
        return parameter(kernel, address, [destination(kernel, t) for t in names], kind)
    where = place(kernel, address, space)
    if store:
        gets = [source(kernel, t, kind) for t in names]

        def write(m):
            memory, at = where(m)
            memory.touch(m, at, size, True)
            for i, get in enumerate(gets):
                memory.put(at + i * kind.itemsize, np.asarray(get(m)))
        return write
    puts = [destination(kernel, t) for t in names]

    def read(m):
        memory, at = where(m)
        memory.touch(m, at, size, False)
        for i, put in enumerate(puts):
            put(m, memory.get(at + i * kind.itemsize, kind))
    return read


def parameter(kernel, address, puts, kind):
    base, _, offset = address.strip('[]').partition('+')
    get = source(kernel, base, np.int64)

    def read(m):
        at = get(m) + int(offset or 0)
        for i, put in enumerate(puts):
            bytes_ = np.arange(i * kind.itemsize, (i + 1) * kind.itemsize)
            put(m, m.parameters[at[..., None] + bytes_].view(kind)[..., 0])
    return read


def asynchronous(kernel, ins):
    """cp.async: the bytes come when the thread waits for their group, and are nobody's till
    then."""
    if ins.parts[2] == 'commit_group':
        def commit(m):
            m.committed[m.sel] += 1
        return commit
    if ins.parts[2] in ('wait_group', 'wait_all'):
        left = int(ins.operands[0]) if ins.parts[2] == 'wait_group' else 0
        return lambda m: arrive(m, left)
    to, of = place(kernel, ins.operands[0], 'shared'), place(kernel, ins.operands[1], 'global')
    size = int(ins.operands[2])
    real = source(kernel, ins.operands[3] if len(ins.operands) > 3 else str(size), np.uint32)

    def copy(m):
        (_, at), (_, there), exists = to(m), of(m), np.broadcast_to(real(m), index_of(m).shape)
        units = m.shared.touch(m, at, size, True, True)
        m.shared.data[at[:, None] + np.arange(size)] = 0xFF
        all_, some = m.sel, exists > 0
        threads = index_of(m)
        if ((exists != 0) & (exists != size)).any():
            raise Unsupported('cp.async of a part')
        m.sel = threads[some]
        m.device.touch(m, there[some], size, False)
        m.sel = all_
        m.copies.append((threads, m.committed[threads], at, np.where(some, there, -1), units, size))
    return copy


def arrive(m, left):
    running = np.zeros(m.n, bool)
    running[m.sel] = True
    still = []
    for threads, group, at, there, units, size in m.copies:
        now = running[threads] & (group < m.committed[threads] - left)
        if now.any():
            bytes_ = np.arange(size)
            data = m.device.data[np.maximum(there[now], 0)[:, None] + bytes_]
            data[there[now] < 0] = 0
            m.shared.data[at[now][:, None] + bytes_] = data
            m.shared.flying[units[now]] = False
            m.shared.filled[units[now]] = True
            m.shared.writer[units[now]] = m.ids[threads[now]][:, None]
            m.shared.written[units[now]] = m.era[threads[now]][:, None]
        if not now.all():
            still.append(tuple(x[~now] if isinstance(x, np.ndarray) else x for x in
                               (threads, group, at, there, units, size)))
    m.copies = still


def shuffle(kernel, ins):
    mode = ins.parts[2]
    to, _, found = ins.operands[0].partition('|')
    put, put_found = destination(kernel, to), destination(kernel, found or None)
    get, by, clamp = (source(kernel, t, np.uint32) for t in ins.operands[1:4])

    def work(m):
        value, b, c = np.broadcast_arrays(get(m), by(m).astype(np.int64), clamp(m).astype(np.int64))
        lane = (index_of(m) % 32).astype(np.int64)
        segment, c = c >> 8 & 31, c & 31
        last = lane & segment | c & ~segment
        from_ = {
            "up": lane - b,
            "down": lane + b,
            "bfly": lane ^ b,
            "idx": lane & segment | b & 31 & ~segment,
        }[mode]
        inside = from_ >= last if mode == 'up' else from_ <= last
        other = index_of(m) - lane + np.where(inside, from_, lane)
        every = np.zeros(m.n, np.uint32)
        every[m.sel] = value
        running = np.zeros(m.n, bool)
        running[m.sel] = True
        if not running[other].all():
            m.blame(~running[other], other, 'shuffle from a lane that is not there')
        put(m, every[other]), put_found(m, inside)
    return work


def vote(kernel, ins):
    mode, put, get = (
        ins.parts[2],
        destination(kernel, ins.operands[0]),
        source(kernel, ins.operands[1], np.bool_),
    )

    def work(m):
        every = np.zeros(m.n, np.int64)
        every[m.sel] = get(m)
        running = np.zeros(m.n, bool)
        running[m.sel] = True
        warps = every.reshape(-1, 32)
        result = {
            "any": warps.any(1),
            "all": (warps.astype(bool) | ~running.reshape(-1, 32)).all(1),
            "ballot": (warps << np.arange(32)).sum(1).astype(np.uint32),
        }[mode]
        put(m, np.repeat(result, 32)[m.sel])
    return work


def halves(x):
    """Two bf16 numbers in each value, as float32."""
    return (x << np.uint32(16)).view(np.float32), (x & np.uint32(0xFFFF0000)).view(np.float32)


def multiply(kernel, ins):
    """mma.m16n8k16: the fragments are laid out as llmc/kernels/mma.cuh says."""
    if ins.opcode != 'mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32':
        raise Unsupported(ins.opcode)
    puts = [destination(kernel, t) for t in vector(ins.operands[0])]
    get_a, get_b = ([source(kernel, t, np.uint32) for t in vector(o)] for o in ins.operands[1:3])
    get_c = [source(kernel, t, np.float32) for t in vector(ins.operands[3])]

    def work(m):
        warps = len(index_of(m)) // 32
        a = np.empty((warps, 2, 8, 2, 4, 2), np.float32)  # row half, g, column half, t, low or high
        b = np.empty((warps, 2, 4, 2, 8), np.float32)      # row half, t, low or high, column g
        for i, get in enumerate(get_a):
            for j, x in enumerate(halves(get(m))):
                a[:, i % 2, :, i // 2, :, j] = x.reshape(warps, 8, 4)
        for i, get in enumerate(get_b):
            for j, x in enumerate(halves(get(m))):
                b[:, i, :, j, :] = x.reshape(warps, 8, 4).swapaxes(1, 2)
        d = (a.reshape(warps, 16, 16) @ b.reshape(warps, 16, 8)).reshape(warps, 2, 8, 4, 2)
        for i, (put, get) in enumerate(zip(puts, get_c)):
            put(m, d[:, i // 2, :, :, i % 2].reshape(-1) + get(m))
    return work


def load_matrices(kernel, ins):
    if 'x4' not in ins.parts or 'm8n8' not in ins.parts:
        raise Unsupported(ins.opcode)
    puts, trans = [destination(kernel, t) for t in vector(ins.operands[0])], 'trans' in ins.parts
    where = place(kernel, ins.operands[1], 'shared')

    def work(m):
        _, at = where(m)
        m.shared.touch(m, at, 16, False)
        rows = m.shared.get((at[:, None] + np.arange(0, 16, 2)).reshape(-1), np.uint16).reshape(
            -1, 4, 8, 8
        )
        if trans:
            rows = rows.swapaxes(2, 3)
        words = np.ascontiguousarray(rows).view(np.uint32)
        for i, put in enumerate(puts):
            put(m, words[:, i].reshape(-1))
    return work


DECODE = {
    "mov": move,
    "cvta": convert_address,
    "setp": compare,
    "cvt": convert,
    "ld": access,
    "st": access,
    "cp": asynchronous,
    "shfl": shuffle,
    "vote": vote,
    "mma": multiply,
    "ldmatrix": load_matrices,
}


def guarded(kernel, guard, step):
    """Runs a step for those of the running threads of which a predicate is true."""
    condition = predicate(kernel, guard)

    def work(m):
        before = m.sel
        chosen = index_of(m)[condition(m)]
        if len(chosen):
            m.sel = chosen
            step(m)
            m.sel = before
    return work


def predicate(kernel, text):
    get = register(kernel, text.lstrip('!'), np.bool_)
    return (lambda m: ~get(m)) if text.startswith('!') else get


def decode(kernel):
    """Makes functions of the instructions."""
    for number, block in enumerate(kernel.blocks):
        block.run, block.end = [], lambda m, here=number + 1: here
        for ins in block.instructions:
            name = ins.parts[0]
            if name == 'bra':
                there = kernel.labels[ins.operands[0]]
                if ins.guard:
                    block.end = lambda m, c=predicate(
                        kernel, ins.guard
                    ), t=there, h=number + 1: m.branch(c(m), t, h)
                else:
                    block.end = lambda m, t=there: t
            elif name in ('ret', 'exit'):
                if ins.guard:
                    raise Unsupported(ins.text)
                block.end = Machine.leave
            elif name == 'bar':
                if ins.parts[1] != 'sync' or ins.operands != ['0'] or ins.guard:
                    raise Unsupported(ins.text)
                block.meets = meeting(None, ins.text)
                block.end = lambda m, h=number + 1: m.barrier(h)
            else:
                step = DECODE.get(name, arithmetic)(kernel, ins)
                if ins.warp:
                    mask = source(
                        kernel, ins.operands[-1] if name in ("shfl", "vote") else "-1", np.int32
                    )
                    block.meets = meeting(mask, ins.text)
                block.run.append(guarded(kernel, ins.guard, step) if ins.guard else step)
    kernel.decoded = True


def meeting(mask, text):
    """A barrier needs all threads of a warp that have not left, other instructions the lanes that
    they name."""
    def meets(m, last):
        if m.sel is ALL:
            return True
        lanes = mask(m).astype(np.int64) & 0xFFFFFFFF if mask else \
            np.repeat((m.alive.reshape(-1, 32).astype(np.int64) << np.arange(32)).sum(1), 32)[m.sel]
        return m.together(lanes, last, text)
    return meets


# ---- programs ------------------------------------------------------------------------------------

class Interpreter:
    def __init__(self, kernels):
        self.kernels, self.device, self.start = kernels, None, 1

    def memory(self, at, size, event):
        self.device.mark(at, size, event != 1, event == 2)  # 0 allocated, 1 freed, 2 written
        if event == 2 and size:
            self.device.written[at // 2:(at + size + 1) // 2] = 0
            self.device.read[at // 2:(at + size + 1) // 2] = 0

    def launch(self, name, grid, block, shared, args):
        kernel = self.kernels[name.decode()]
        if kernel.dynamic:
            at = kernel.shared[-1][0]
            kernel.shared[-1], kernel.shared_bytes = (at, shared), at + shared
        try:
            self.interpret(kernel, [grid[i] for i in range(3)], [block[i] for i in range(3)], args)
        except (Fault, Unsupported) as error:
            what = 'FAULT' if isinstance(error, Fault) else 'UNSUPPORTED'
            print(f'{what} {kernel.name}: {error}', flush=True)
            return 1
        except Exception:
            traceback.print_exc()
            os._exit(1)
        return 0

    def interpret(self, kernel, grid, block, args):
        if not kernel.decoded:
            decode(kernel)
        parameters = np.zeros(kernel.parameter_bytes, np.uint8)
        for i, (at, size) in enumerate(kernel.sizes):
            parameters[at:at + size] = np.frombuffer(ctypes.string_at(args[i], size), np.uint8)
        blocks = grid[0] * grid[1] * grid[2]
        at_once = max(1, BATCH // (-(-block[0] * block[1] * block[2] // 32) * 32))
        most = self.start
        for first in range(0, blocks, at_once):
            count = min(at_once, blocks - first)
            m = Machine(kernel, self.device, grid, block, parameters, self.start, first, count)
            m.at = 0
            kernel.executed += m.run()
            most = max(most, int(m.era.max()))
        self.start = most + 1
        kernel.launches += 1


def compiled(program, precision, source, defines):
    """Compiles a program unless that is done, with no code for any GPU but PTX. Returns the library
    and the PTX."""
    name = os.path.splitext(os.path.basename(program))[0]
    folder = os.path.abspath(
        os.path.join(source, "build", "ptx", "-".join([name, precision] + defines))
    )
    library, text = f'{folder}/{name}.so', f'{folder}/{name}.ptx'
    runtime = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'ptx_runtime.cpp')
    inputs = [os.path.join(top, file) for tree in ('llmc', 'dev/cuda') for top, _, files in
              os.walk(os.path.join(source, tree)) for file in files] + [runtime]
    if all(map(os.path.exists, (library, text))) and os.path.getmtime(library) > max(
        map(os.path.getmtime, inputs)
    ):
        return library, text
    nvcc = os.environ.get('NVCC') or shutil.which('nvcc') or '/usr/local/cuda/bin/nvcc'
    if not os.path.exists(nvcc):
        sys.exit('skip: there is no nvcc\n0 passed, 0 failed')
    os.makedirs(folder, exist_ok=True)
    subprocess.run(
        [
            nvcc,
            "-std=c++17",
            "-O3",
            f"-I{source}",
            f"-DPRECISION_{precision.upper()}",
            *(f"-D{d}" for d in defines),
            "-gencode",
            "arch=compute_80,code=compute_80",
            "-diag-suppress",
            "177",
            "-shared",
            "-cudart",
            "none",
            "-Xcompiler",
            "-fPIC,-O1,-fopenmp",
            "-keep",
            "-keep-dir",
            folder,
            "-o",
            library,
            os.path.join(source, program),
            runtime,
        ],
        check=True,
    )
    return library, text


def load(library, interpreter):
    """Loads a program with this interpreter behind its launches, and makes the device's memory."""
    program, numbers, size = ctypes.CDLL(library), ctypes.POINTER(ctypes.c_uint), ctypes.c_size_t()
    program.hooks = (
        ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, numbers, numbers, ctypes.c_size_t,
                         ctypes.POINTER(ctypes.c_void_p))(interpreter.launch),
        ctypes.CFUNCTYPE(None, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)(interpreter.memory))
    program.ptx_start.restype = ctypes.c_void_p
    base = program.ptx_start(*program.hooks, ctypes.byref(size))
    interpreter.device = Memory(
        np.frombuffer((ctypes.c_uint8 * size.value).from_address(base), np.uint8)
    )
    interpreter.device.base = np.uint64(base)
    return program


def readable(mangled):
    text = subprocess.run(
        ["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True
    ).stdout
    return [
        re.sub(r"\(.*", "", re.sub(r"\((int|bool|unsigned int)\)|^void ", "", line))
        for line in text.splitlines()
    ]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="ptx.py [options] PROGRAM.cu [ARGUMENT...]",
        add_help=True,
    )
    parser.add_argument('program')
    parser.add_argument('arguments', nargs='*')
    parser.add_argument('--precision', choices=['bf16', 'fp32'], default='bf16')
    parser.add_argument('--source', default='.')
    parser.add_argument('--define', action='append', default=[])
    options = parser.parse_args()
    library, text = compiled(options.program, options.precision, options.source, options.define)
    interpreter = Interpreter(read_kernels(open(text).read()))
    program = load(library, interpreter)
    words = [options.program] + options.arguments
    code = program.main(
        len(words), (ctypes.c_char_p * (len(words) + 1))(*map(str.encode, words), None)
    )
    ctypes.CDLL(None).fflush(None)
    kernels = sorted(
        zip(readable(interpreter.kernels), interpreter.kernels.values()), key=lambda x: x[0]
    )
    print(
        f'\n{"launches":>8} {"instructions":>14}  kernel, {options.precision}: '
        'instructions of threads'
    )
    for name, kernel in kernels:
        if kernel.launches:
            print(f'{kernel.launches:8} {kernel.executed:14,}  {name}')
    idle = [name for name, kernel in kernels if not kernel.launches]
    print(
        f"{len(kernels) - len(idle)} kernels of {len(kernels)} ran"
        + (f'; not {", ".join(idle)}' if idle else "")
    )
    return code


if __name__ == '__main__':
    np.seterr(all='ignore')
    sys.exit(main())
