#!/usr/bin/env python3
"""cpu_speed.py [BUILD [PATTERN]]: the time of a training step on this CPU, beside the floor that
its matrix products set: the same products alone, each by one call of dnnl_sgemm. With PEER=python3
also beside PyTorch, eager and compiled (dev/torch_gpt2.py), if that interpreter has torch. Prints a
table in Markdown; PATTERN chooses rows.

The programs take turns, a few steps each, and stand still (SIGSTOP) while another one has its turn.
So each ratio is of neighbours in time; its median over TURNS=9 turns is printed, and the median of
the times. With THREADS=1, the default, times are those that the CPU spent in the program, so that
other programs on the machine matter little; with more threads they are of the clock on the wall,
and the machine must be quiet.
"""

import sys

if {"-h", "--help"} & set(sys.argv[1:]):
    sys.exit(print(__doc__))

import ctypes
import ctypes.util
import glob
import os
import random
import signal
import statistics
import struct
import subprocess
import tempfile
import time

# Row, layers, heads, channels, vocabulary, sequences, tokens of each, steps of a turn.
SHAPES = [
    ('GPT-2 124M, B 4, T 64', 12, 12, 768, 50257, 4, 64, 2),
    ('GPT-2 124M, B 4, T 256', 12, 12, 768, 50257, 4, 256, 1),
    ('GPT-2 124M, B 1, T 1024', 12, 12, 768, 50257, 1, 1024, 1),
    ("4 layers, 128 channels, B 16, T 64 (`make train`'s model)", 4, 4, 128, 257, 16, 64, 20),
]
FLAGS = 'layers', 'heads', 'channels', 'vocab', 'micro-batch', 'seq'
THREADS = int(os.environ.get('THREADS', 1))


class Turns:
    """A program that prints a line with 'step' at the end of each step, and runs only in its
    turn."""

    def __init__(self, command):
        environment = dict(os.environ, OMP_NUM_THREADS=str(THREADS), PYTHONUNBUFFERED='1')
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        self.turn(3)  # the first steps allocate and compile

    def cpu_seconds(self):
        tasks = glob.glob(f'/proc/{self.process.pid}/task/*/schedstat')
        return sum(int(open(task).read().split()[0]) for task in tasks) / 1e9

    def turn(self, steps):
        """Seconds of a step."""
        self.process.send_signal(signal.SIGCONT)
        begin = time.perf_counter()
        for _ in range(steps):
            while True:
                line = self.process.stdout.readline()
                if not line:
                    sys.exit(f'error: {self.process.args[0]} ended')
                if 'step' in line:
                    break
        wall, cpu = time.perf_counter() - begin, self.cpu_seconds()
        self.process.send_signal(signal.SIGSTOP)
        spent, self.spent = cpu - getattr(self, 'spent', 0), cpu
        return (spent if THREADS == 1 else wall) / steps

    def end(self):
        self.process.kill()
        self.process.wait()


def products(layers, channels, columns, rows):
    """(m, n, k, of X, of Y) of the products of a step, row-major: forward, gradient of the input,
    of the weights."""
    C, N = channels, rows
    widths = layers * [(C, 3 * C), (C, C), (C, 4 * C), (4 * C, C)] + [(C, columns)]
    for into, out in widths:
        yield from [(N, out, into, 'N', 'N'), (N, into, out, 'N', 'T'), (into, out, N, 'T', 'N')]


def floor(layers, channels, columns, rows):
    """Computes the products of a step again and again. Nothing reads what they make."""
    dnnl = ctypes.CDLL(ctypes.util.find_library('dnnl'))
    size, number = ctypes.c_int64, ctypes.c_float
    matrix = ctypes.POINTER(ctypes.c_float)
    char = ctypes.c_char
    dnnl.dnnl_sgemm.argtypes = [
        char,
        char,
        size,
        size,
        size,
        number,
        matrix,
        size,
        matrix,
        size,
        number,
        matrix,
        size,
    ]
    work = list(products(layers, channels, columns, rows))
    # Three rings, from which each product takes the next places, as each layer has weights and
    # activations of its own.
    largest = [
        max(a * b for a, b in sides)
        for sides in zip(*(((m, k), (k, n), (m, n)) for m, n, k, _, _ in work))
    ]
    rings = [(ctypes.c_float * (longest + (4 << 20)))() for longest in largest]
    some = (ctypes.c_float * (1 << 16))(*((i * 7919 % 1009 - 504) / 1009 for i in range(1 << 16)))
    for ring in rings[:2]:
        for i in range(0, ctypes.sizeof(ring), ctypes.sizeof(some)):
            ctypes.memmove(
                ctypes.byref(ring, i), some, min(ctypes.sizeof(some), ctypes.sizeof(ring) - i)
            )
    at = [0, 0, 0]
    while True:
        for m, n, k, x, y in work:
            places = []
            for i, length in enumerate((m * k, k * n, m * n)):
                if at[i] + length > len(rings[i]):
                    at[i] = 0
                places.append(ctypes.cast(ctypes.byref(rings[i], 4 * at[i]), matrix))
                at[i] = (at[i] + length + 15) // 16 * 16
            a, b, c = places
            status = dnnl.dnnl_sgemm(
                x.encode(),
                y.encode(),
                m,
                n,
                k,
                1.0,
                a,
                m if x == "T" else k,
                b,
                k if y == "T" else n,
                0.0,
                c,
                n,
            )
            if status != 0:
                sys.exit(f'error: dnnl_sgemm returned {status}')
        print('step', flush=True)


def write_tokens(file, vocab):
    """A shard of random tokens."""
    count = 1 << 16
    file.write(struct.pack('<256i', 20240520, 1, count, *[0] * 253))
    file.write(struct.pack(f'<{count}H', *(random.randrange(vocab) for _ in range(count))))
    file.flush()


def processor():
    for line in open('/proc/cpuinfo'):
        if line.startswith('model name'):
            return line.split(':', 1)[1].strip()
    return 'unknown processor'


def vectors():
    flags = next((line for line in open('/proc/cpuinfo') if line.startswith('flags')), '').split()
    return 'AVX-512' if 'avx512f' in flags else 'AVX2' if 'avx2' in flags else 'no AVX2'


def torch_version(peer):
    if not peer:
        return ''
    found = subprocess.run(
        [peer, "-c", "import torch; print(torch.__version__)"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    return found.stdout.strip() if found.returncode == 0 else ''


def main():
    if sys.argv[1:2] == ['--floor']:
        return floor(*map(int, sys.argv[2:]))
    build, pattern = (sys.argv[1:] + ['build/cpu-fp32', ''][len(sys.argv) - 1:])[:2]
    peer, turns = os.environ.get('PEER', ''), int(os.environ.get('TURNS', 9))
    version = torch_version(peer)
    names = (
        ["ours"]
        + ["floor"] * bool(ctypes.util.find_library("dnnl"))
        + ["eager", "compile"] * bool(version)
    )
    clock = 'milliseconds of CPU time' if THREADS == 1 else 'milliseconds'
    print(
        f'{processor()} ({vectors()}), {THREADS} thread{"s" if THREADS > 1 else ""}, fp32, '
        f'{clock} a step{", PyTorch " + version if version else ""}.\n'
    )
    if peer and not version:
        print(f'PyTorch was not compared: {peer} has no torch.\n')
    print('| work | ' + ' | '.join(names + ['ours / ' + name for name in names[1:]]) + ' |')
    print('|---' * (2 * len(names)) + '|')
    for row, *shape, steps in (shape for shape in SHAPES if pattern in shape[0]):
        layers, _, channels, vocab, batch, seq = shape
        tokens = tempfile.NamedTemporaryFile()
        write_tokens(tokens, vocab)
        flags = [word for name, n in zip(FLAGS, shape) for word in ('--' + name, str(n))]
        torch = [peer, 'dev/torch_gpt2.py', '--device', 'cpu', '--steps', '1000000'] + flags
        commands = {
            "ours": [
                build + "/train_gpt",
                "--train-data",
                tokens.name,
                "--val-every",
                "0",
                "--steps",
                "1000000",
            ]
            + flags,
            "floor": [
                sys.executable,
                __file__,
                "--floor",
                str(layers),
                str(channels),
                str((vocab + 127) // 128 * 128),
                str(batch * seq),
            ],
            "eager": torch + ["--compile", "0"],
            "compile": torch + ["--compile", "1"],
        }
        programs = []
        try:
            for name in names:
                programs.append(Turns(commands[name]))
            times = [[program.turn(steps) for program in programs] for _ in range(turns)]
        finally:
            for program in programs:
                program.end()
        medians = [
            f'{1e3 * statistics.median(column):.{0 if row.startswith("GPT") else 1}f}'
            for column in zip(*times)
        ]
        ratios = [
            f"{statistics.median(turn[0] / turn[i] for turn in times):.2f}"
            for i in range(1, len(names))
        ]
        print(f'| {row} | ' + ' | '.join(medians + ratios) + ' |', flush=True)


if __name__ == '__main__':
    main()
