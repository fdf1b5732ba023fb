#!/usr/bin/env python3
"""asm.py: what a CPU is asked to execute: the innermost loops of each kernel of llmc/kernels,
compiled as the trainers are, for AVX2 (x86-64-v3) and AVX-512 (x86-64-v4), and read by objdump. It
is cross-compiled: this machine need not run it.

  vector   arithmetic on whole registers in the loop that has most: additions, products, roots,
           comparisons
  scalar   the same on one float, in that loop
  of all   and in all innermost loops together

Fails if a kernel has more scalar arithmetic than its budget below: then a compiler has stopped to
make vectors of a loop, which costs a factor of 4 to 16. It needs g++ and objdump.
"""

import sys

if {"-h", "--help"} & set(sys.argv[1:]):
    sys.exit(print(__doc__))

import os
import re
import subprocess
import tempfile

FLAGS = """-std=c++17 -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math
    -mprefer-vector-width=512 -w""".split()

# (function that launches, part of the launch's name, which of its launches, most scalar arithmetic
# of the loop with most vector arithmetic, and of all). Not 0 are the last elements of a row
# or a share, the sum of a register's floats, and logarithms of a row.
LOOPS = [
    ('gelu_forward', 'integral_constant<int, 16>', 1, 0, 0),
    ('gelu_backward', 'integral_constant<int, 16>', 1, 0, 0),
    ('adamw_update', '', 1, 133, 133),
    ('layernorm_residual_forward', 'integral_constant<int, 16>', 1, 6, 13),
    ('layernorm_backward', 'integral_constant<int, 16>', 1, 0, 6),
    ('classifier_stats', 'integral_constant<int, 16>', 1, 17, 72),
    ('classifier_gradient', 'integral_constant<int, 16>', 1, 0, 0),
    ('attention_rows', 'false>', 1, 0, 16),
    ('attention_rows', 'false>', 2, 0, 0),
    ('attention_rows', 'false>', 3, 0, 0),
]

SOURCE = '''
#include "llmc/kernels/attention.cuh"
#include "llmc/kernels/adamw.cuh"
#include "llmc/kernels/classifier.cuh"
#include "llmc/kernels/gelu.cuh"
#include "llmc/kernels/layernorm.cuh"
void all(float *x, int *i, size_t n, Layernorm ln, AdamW h, Piece *p, cudaStream_t s) {
    gelu_forward(x, x, n, s), gelu_backward(x, x, x, x, x, n, n, true, s);
    adamw_update(x, NULL, x, x, x, p, n, 1, n, h, s);
    layernorm_forward(ln, x, x, x, n, n, s);
    layernorm_backward(x, x, x, x, x, x, x, x, ln, n, n, true, s);
    classifier_stats(x, x, x, x, i, n, n, n, n, s);
    classifier_gradient(x, x, x, x, x, i, 1.0f, n, n, n, n, true, s);
    attention_forward(x, x, x, n, n, n, n, s), attention_backward(x, x, x, x, x, x, n, n, n, n, s);
}
'''

ARITHMETIC = re.compile(
    r"v?(add|sub|mul|div|sqrt|max|min|cmp\w*|u?comi|f[n]?m(add|sub)\d+|and|andn|or|xor)([ps])s$"
)


def functions(arch, folder):
    """{name: [(address, operation, target of a jump or None)]}"""
    source, program = os.path.join(folder, 'all.cpp'), os.path.join(folder, arch + '.o')
    with open(source, 'w') as f:
        f.write(SOURCE)
    compiler = os.environ.get('CXX', 'g++').split()
    subprocess.run(
        compiler
        + FLAGS
        + [
            f"-march={arch}",
            "-fopenmp",
            "-Illmc/cpu",
            "-Illmc/mpi",
            "-I.",
            "-DPRECISION_FP32",
            "-c",
            "-o",
            program,
            source,
        ],
        check=True,
    )
    text = subprocess.run(
        ["objdump", "-dC", "--no-show-raw-insn", program],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    found, code = {}, []
    for line in text.splitlines():
        head = re.match(r'[0-9a-f]+ <(.*)>:$', line)
        if head:
            code = found.setdefault(head[1], [])
            continue
        step = re.match(r'\s*([0-9a-f]+):\s+(\S+)\s*(.*)', line)
        if step:
            jump = re.match(r'([0-9a-f]+) <', step[3]) if step[2].startswith('j') else None
            code.append((int(step[1], 16), step[2], int(jump[1], 16) if jump else None))
    return found


def hot_loop(code):
    """(vector, scalar) of the innermost loop with most vector arithmetic, and the scalar arithmetic
    of them all."""
    loops = [(target, at) for at, _, target in code if target is not None and target <= at]
    inner = [
        (a, b)
        for a, b in loops
        if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in loops)
    ]
    kinds = [
        [m[3] for at, name, _ in code if first <= at <= last for m in [ARITHMETIC.match(name)] if m]
        for first, last in inner
    ]
    best = max(((k.count('p'), k.count('s')) for k in kinds), default=(0, 0))
    return *best, sum(k.count('s') for k in kinds)


def main():
    failed = passed = 0
    print(f'{"innermost loops of":44} {"":10} {"vector":>6} {"scalar":>6} {"of all":>6}')
    with tempfile.TemporaryDirectory() as folder:
        for arch in 'x86-64-v3', 'x86-64-v4':
            found = functions(arch, folder)
            for function, part, launch, most, most_of_all in LOOPS:
                bodies = [
                    code
                    for name, code in found.items()
                    if name.startswith(f"CpuWork<{function}")
                    and "::body(" in name
                    and part in name
                    and f"#{launch}" in name.split("::body(")[0][len(function) :]
                    and "[clone .cold" not in name
                ]
                loops = [hot_loop(code) for code in bodies]
                vector, scalar, of_all = max(loops, default=(0, 0, 0))
                of_all = max((loop[2] for loop in loops), default=0)
                good = vector > 0 and scalar <= most and of_all <= most_of_all
                passed, failed = passed + good, failed + (not good)
                name = f'{function.split("<")[0]} {launch if function == "attention_rows" else ""}'
                print(
                    f'{"" if good else "FAIL "}{name:44} {arch:10} {vector:6} {scalar:6} {of_all:6}'
                )
    print(f'{passed} passed, {failed} failed')
    return failed > 0


sys.exit(main())
