#!/usr/bin/env python3
"""sass.py: what a GPU is asked to execute, known without one: every kernel of llmc/kernels compiled
as the trainers ship it, for sm_80 and sm_90a, fp32 and bf16, and its machine code (SASS) read.

  dev/sass.py            prints a table, a row a kernel; fails if a kernel spills registers or
                         exceeds a budget below
  dev/sass.py REGEX      only kernels whose name matches, and every loop of each

  registers, shared      of a thread, and static bytes of a block
  warps                  that fit on a multiprocessor at the kernel's largest block, of 64
  HMMA, other            tensor-core (HMMA, or a warpgroup's HGMMA) and other instructions of the
                         loop that moves most, on the way through it that moves most with fewest
                         instructions: once for a tile of attention, a pack of a row
  each                   other instructions for an HMMA; without HMMA, instructions for 16 bytes
                         that a thread asks memory for
  in flight              loads of 16 bytes from which no instruction needs anything before the next
                         barrier; shown with REGEX
  at once                most loads of a straight piece of code of which none has been used yet;
                         shown with REGEX

It needs nvcc, c++filt, and nvdisasm (of the CUDA toolkit, or the PyPI package
nvidia-cuda-nvdisasm): in PATH, beside nvcc, or named by NVCC and NVDISASM. Without nvdisasm there
are registers, shared memory and spills, and no budgets. ARCHITECTURES='90' and PRECISIONS='bf16'
leave out the others.
"""

import sys

if {"-h", "--help"} & set(sys.argv[1:]):
    sys.exit(print(__doc__))

import concurrent.futures
import glob
import os
import re
import shutil
import subprocess
import tempfile

# Upper bounds: (kernel, precision, column, most), for both architectures. A budget that meets
# no kernel is a failure too.
BUDGETS = [
    # 64 keys of a head of 64 channels and 32 rows: 128 products of 16 x 8 x 16 by a warp
    ("attention_forward_mma_kernel<Mma<64>, false>", "bf16", "instructions", 600),
    ("attention_forward_mma_kernel<Mma<64>, false>", "bf16", "each", 3.6),
    # 16 rows with dropout: 64 products, 4 blocks of Philox a lane
    ("attention_forward_mma_kernel<Mma<64>, true>", "bf16", "instructions", 750),
    # of a pair of ranks, whose rows have positions of their own; with dropout these number the
    # masks
    ("attention_forward_mma_kernel<Mma<64, Pair>, false>", "bf16", "instructions", 600),
    ("attention_forward_mma_kernel<Mma<64, Pair>, true>", "bf16", "instructions", 870),
    ("attention_backward_query_mma_kernel<Mma<64, Pair>, false>", "bf16", "instructions", 380),
    # 64 queries against 64 keys and values, for each head of q that a head of k serves: 128
    # products by a warp
    ("attention_backward_key_mma_kernel<Mma<64>, false>", "bf16", "instructions", 500),
    # Hopper's: 64 keys of a head of 64 channels and 64 rows by a warpgroup; 64 queries of a head of
    # 128. Two blocks fit.
    ("attention_forward_wgmma_kernel<Wgmma<64, 64, 4, 2, false>>", "bf16", "instructions", 270),
    ("attention_forward_wgmma_kernel<Wgmma<64, 64, 4, 2, false>>", "bf16", "registers", 128),
    (
        "attention_backward_query_wgmma_kernel<Wgmma<64, 64, 4, 2, false>>",
        "bf16",
        "instructions",
        275,
    ),
    ("attention_backward_query_wgmma_kernel<Wgmma<64, 64, 4, 2, false>>", "bf16", "registers", 128),
    ("attention_backward_key_wgmma_kernel<Wgmma<64, 64, 4, 1, true>>", "bf16", "registers", 168),
    ("attention_forward_wgmma_kernel<Wgmma<128, 128, 2, 1, true>>", "bf16", "registers", 168),
    ("attention_backward_query_wgmma_kernel<Wgmma<128, 64, 3, 1, true>>", "bf16", "registers", 168),
    (
        "attention_backward_key_wgmma_kernel<Wgmma<128, 64, 3, 1, false>>",
        "bf16",
        "instructions",
        470,
    ),
    # the merge of a ring's outputs: reads 8 bytes and writes 4 for each channel
    ("attention_merge_kernel", "bf16", "each", 32),
    # 24 a logit: 10 where 16 bytes are 8 logits that are read, 14 where they are 4 that are read
    # and written
    ("classifier_stats_kernel<8>", "bf16", "each", 80),
    ("classifier_gradient_kernel<8>", "bf16", "each", 56),
    # both in one: two blocks on a multiprocessor
    ("classifier_row_kernel", "bf16", "registers", 64),
    # Llama's block: a rotation is 4 multiplications for 2 elements, silu an exponential and a
    # division
    ("rope_kernel<8>", "bf16", "each", 16),
    ("swiglu_kernel<8, false>", "bf16", "each", 38),
    ("swiglu_kernel<8, true>", "bf16", "each", 37),
    ("relu2_kernel<8>", "bf16", "each", 29),
    # Muon's kernels beside its products; the update by elements, as any part of a row is owned
    ("muon_combine_kernel<8>", "bf16", "each", 20),
    ("muon_momentum_kernel<4>", "bf16", "each", 6.5),
    ("muon_update_kernel", "bf16", "each", 50),
    ("layernorm_forward_kernel<8, 1, false>", "bf16", "each", 20),
    ("layernorm_backward_columns_kernel<8, 1, 1>", "bf16", "each", 48),
    # without dropout's branch: 48 and 64 warps on a multiprocessor
    ("layernorm_forward_kernel<8, 0, false>", "bf16", "registers", 40),
    ("residual_forward_kernel<8, 0, false>", "bf16", "registers", 32),
    ("layernorm_backward_columns_kernel<8, 1, 0>", "bf16", "each", 54),
]

# Lower bounds: (kernel, precision, column, least).
FLOORS = [
    # of the next row: inp, dout and dresidual
    ('layernorm_backward_columns_kernel<8, 1, 0>', 'bf16', 'in flight', 3),
    # of 12 rows, of 64 rows, and of 2 rows of two matrices. Without a bound on its blocks a
    # compiler saves registers for warps that these launches do not have.
    ('bias_partial_kernel<8>', 'bf16', 'at once', 12),
    ('column_sums_kernel', 'bf16', 'at once', 64),
    ('gelu_backward_kernel<8>', 'bf16', 'at once', 4),
]

# Warps on a multiprocessor: (name, kernel, precision, threads of a block, least).
OCCUPANCY = [
    ("layernorm backward, C = 768", "layernorm_backward_columns_kernel<8, 1, 0>", "bf16", 384, 24),
    ("layernorm backward, C = 1600", "layernorm_backward_columns_kernel<8, 1, 0>", "bf16", 672, 16),
    (
        "layernorm backward, C = 12288",
        "layernorm_backward_columns_kernel<8, 3, 0>",
        "bf16",
        512,
        16,
    ),
]

ARCHITECTURE_OF = {90: '90a'}  # what the Makefile compiles for it
SHARED_OF_SM = {80: 164 * 1024, 90: 228 * 1024}  # bytes; a block costs 1 KiB more than it uses
ADDRESS = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\d+|@!?U?PT)\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);"
)


def tool(variable, folder, name):
    """The path of a tool, or None."""
    beside = os.path.join(folder, name)
    return (
        os.environ.get(variable)
        or shutil.which(name)
        or (beside if os.path.exists(beside) else None)
    )


def headers():
    return sorted(glob.glob('llmc/kernels/*.cuh'))


def program():
    """A program with every kernel: its launching functions make every instance of a template that
    is ever launched. Those that are templates themselves are made by taking their addresses."""
    launch = [
        f"{function}<{norm}>"
        for norm in ("NORM_LAYER", "NORM_RMS", "NORM_1P")
        for function in (
            "layernorm_forward",
            "layernorm_residual_forward",
            "residual_forward",
            "layernorm_backward",
        )
    ]
    launch += [f'columns_move<{types}>' for types in
               ('false, floatX, floatX', 'false, floatX, float', 'true, float, float')]
    return (
        "".join(f'#include "{header}"\n' for header in headers())
        + "void *addresses[] = {"
        + ", ".join(f"(void *)&{function}" for function in launch)
        + "};\n"
    )


def declared():
    """The names of all kernels."""
    text = ''.join(open(header).read() for header in headers())
    text = re.sub(r'__launch_bounds__\((?:[^()]|\([^()]*\))*\)', '', text)
    return set(re.findall(r'__global__\s+void\s+(\w+)\(', text))


def compile_kernels(folder, arch, precision):
    source = os.path.join(folder, 'kernels.cu')
    cubin = os.path.join(folder, f'{arch}-{precision}.cubin')
    done = subprocess.run([NVCC, '-std=c++17', '-O3', '-I.', f'-DPRECISION_{precision.upper()}',
                           f'-arch=sm_{ARCHITECTURE_OF.get(arch, arch)}',
                           '-diag-suppress', '177', '-cubin', '-Xptxas', '-v', '-o', cubin, source],
                          capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return cubin, done.stderr


def resources(log):
    """name -> registers, static shared memory, bytes spilled, from what the assembler says."""
    found, name, spilled = {}, None, 0
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            name = match[1]
        elif match := re.search(r'(\d+) bytes spill stores, (\d+) bytes spill loads', line):
            spilled = int(match[1]) + int(match[2])
        elif name and (match := re.search(r'Used (\d+) registers', line)):
            shared = re.search(r'(\d+) bytes smem', line)
            found[name] = (int(match[1]), int(shared[1]) if shared else 0, spilled)
            name = None
    return found


def functions(cubin):
    """name -> (threads of a block, [(label or None, predicate, opcode, operands)])."""
    text = subprocess.run([NVDISASM, cubin], capture_output=True, text=True, check=True).stdout
    code, threads, name, info, pending = {}, {}, None, None, None
    lines = iter(text.splitlines())
    for line in lines:
        if match := re.match(r'^\.text\.(\w+):', line):
            name, pending = match[1], None
            code[name] = []
        elif line.startswith('//-----'):
            match = re.search(r'\.nv\.info\.(\w+)', line)
            name, info = None, match[1] if match else None
        elif info and 'EIATTR_MAX_THREADS' in line:
            words = []
            while len(words) < 3:
                words += re.findall(r'\.word\s+(0x[0-9a-f]+)', next(lines))
            threads[info] = int(words[0], 16) * int(words[1], 16) * int(words[2], 16)
        elif name and (match := re.match(r'^(\.L_\w+|\$\w+):', line)):
            pending = match[1] if pending is None else pending
            code[name].append((match[1], '', 'LABEL', ''))
        elif name and (match := ADDRESS.match(line)):
            code[name].append((None, match[2] or '', match[3], match[4]))
    return {n: (threads.get(n, 0), c) for n, c in code.items()}


def weight(opcode, operands):
    """HMMA, bytes that a thread asks global memory for, and one instruction less to have."""
    if opcode.startswith(('HMMA', 'HGMMA')):
        return (1, 0, -1)
    size = 0
    if re.match(r'(LDG|STG|LDGSTS|LD|ST)(\.|$)', opcode):
        width = re.search(r'\.(128|64|U16|S16|U8|S8)', opcode)
        size = {'128': 16, '64': 8, 'U16': 2, 'S16': 2, 'U8': 1, 'S8': 1}[width[1]] if width else 4
    return (0, size, -1)


def blocks_of(code):
    """Basic blocks: their weights, and which follow each."""
    starts, labels, index = [], {}, -1
    weights, follow, ends = [], [], []
    new = True
    for label, predicate, opcode, operands in code:
        if opcode == 'LABEL' or new:
            if opcode == 'LABEL' and index >= 0 and not new and weights[index] == []:
                labels[label] = index  # two labels in a row
                continue
            index += 1
            weights.append([]), follow.append(set()), ends.append(None)
            if opcode == 'LABEL':
                labels[label] = index
                new = False
                continue
            new = False
        weights[index].append(weight(opcode, operands))
        if re.match(r'(BRA|BRX|EXIT|RET|JMP|BSYNC|KILL)', opcode) and opcode != 'BSYNC':
            target = re.search(r'`\(([^)]+)\)', operands)
            # A condition may also stand among the operands: BRA P1, ... or BRA.DIV UR4, ...
            always = predicate in ('', '@PT') and not re.match(r'\s*(!?U?P\d|~?U?R)', operands)
            ends[index] = (opcode, always, target[1] if target else None)
            new = True
    for i, end in enumerate(ends):
        falls = True
        if end:
            opcode, always, target = end
            if target in labels:
                follow[i].add(labels[target])
            falls = not always
        if falls and i + 1 < len(ends):
            follow[i].add(i + 1)
    total = [tuple(map(sum, zip(*w))) if w else (0, 0, 0) for w in weights]
    return total, follow


def loops_of(total, follow):
    """The natural loops: [(header, blocks)], by dominators."""
    n = len(total)
    before = [set() for _ in range(n)]
    for i in range(n):
        for j in follow[i]:
            before[j].add(i)
    reached, stack = {0}, [0]
    while stack:
        for j in follow[stack.pop()]:
            if j not in reached:
                reached.add(j), stack.append(j)
    everything = set(reached)
    dominators = {i: everything for i in reached}
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for i in sorted(reached - {0}):
            sets = [dominators[j] for j in before[i] if j in reached]
            new = set.intersection(*sets) | {i}
            if new != dominators[i]:
                dominators[i], changed = new, True
    loops = {}
    for i in reached:
        for h in follow[i]:
            if h in dominators[i]:
                body, stack = {h, i}, [i]
                while stack:
                    j = stack.pop()
                    if j == h:
                        continue
                    for k in before[j]:
                        if k in reached and k not in body:
                            body.add(k), stack.append(k)
                loops[h] = loops.get(h, set()) | body
    return [
        (h, body, {(i, j) for i in body for j in follow[i] if j in dominators[i]})
        for h, body in loops.items()
    ]


def way(header, body, back, total, follow):
    """The best way once around a loop: most HMMA, then most bytes, then fewest instructions."""
    memo = {}

    def best(i):
        if i not in memo:
            memo[i] = None
            options = [best(j) for j in follow[i] if j in body and (i, j) not in back]
            options = [o for o in options if o is not None]
            if header in follow[i]:
                options.append((0, 0, 0))
            if options:
                memo[i] = tuple(a + b for a, b in zip(max(options), total[i]))
        return memo[i]
    sys.setrecursionlimit(10000)
    return best(header)


def kernel_loops(code):
    """[(HMMA, bytes, other instructions, has a loop inside)] of a kernel."""
    total, follow = blocks_of(code)
    loops = loops_of(total, follow)
    result = []
    for header, body, back in loops:
        found = way(header, body, back, total, follow)
        if found:
            inner = any(h != header and h in body for h, _, _ in loops)
            result.append((found[0], found[1], -found[2] - found[0], inner))
    return result


def in_flight(code):
    """How many loads of 16 bytes nothing waits for before a barrier."""
    count = 0
    for i, (_, _, opcode, operands) in enumerate(code):
        if not re.match(r'LDG\.(.*\.)?128', opcode):
            continue
        first = int(re.match(r'R(\d+)', operands)[1])
        for _, _, later, touched in code[i + 1:]:
            if later.startswith('BAR'):
                count += 1
            if re.match('BAR|EXIT|RET', later) or any(first <= int(n) < first + 4
                                                      for n in re.findall(r'\bR(\d+)', touched)):
                break
    return count


def at_once(code):
    """The most loads of which no instruction has needed anything yet, in a piece of code without
    jumps."""
    most, pending = 0, []
    for _, _, opcode, operands in code:
        touched = {int(n) for n in re.findall(r'\bR(\d+)', operands)}
        load = re.match(r'LDG\.', opcode) and re.match(r'R(\d+)', operands)
        if load:
            touched.discard(int(load[1]))
        pending = [registers for registers in pending if not registers & touched]
        if re.match('BRA|LABEL', opcode):
            pending = []
        if load:
            first, words = int(load[1]), 4 if '.128' in opcode else 2 if '.64' in opcode else 1
            pending.append(set(range(first, first + words)))
            most = max(most, len(pending))
    return most


def warps_of(arch, threads, registers, shared):
    """Warps on a multiprocessor: registers go to a warp by 256, and a block has a KiB of shared
    memory for itself."""
    warps = (threads + 31) // 32
    by_registers = 65536 // ((registers * 32 + 255) // 256 * 256) // warps
    by_shared = SHARED_OF_SM[arch] // ((shared + 1024 + 127) // 128 * 128)
    return min(by_registers, by_shared, 32, 64 // warps) * warps


def names(mangled):
    text = subprocess.run(
        ["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True
    ).stdout
    short = [
        re.sub(r"\(.*", "", re.sub(r"^void |\(Norm\)", "", line)) for line in text.splitlines()
    ]
    for left_out in (', Attention>', '>'), ('Attention', ''), ('(int)', ''), (' >', '>'):
        short = [s.replace(*left_out) for s in short]
    return dict(zip(mangled, short))


def rows(folder, pattern):
    with open(os.path.join(folder, 'kernels.cu'), 'w') as file:
        file.write(program())
    # A compiler has one thread.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = {
            (int(arch), precision): pool.submit(compile_kernels, folder, int(arch), precision)
            for arch in os.environ.get('ARCHITECTURES', '80 90').split()
            for precision in os.environ.get('PRECISIONS', 'fp32 bf16').split()
        }
        for (arch, precision), result in compiled.items():
            cubin, log = result.result()
            used, code = resources(log), functions(cubin) if NVDISASM else {}
            readable = names(sorted(used))
            for name in sorted(used, key=readable.get):
                if pattern and not re.search(pattern, readable[name]):
                    continue
                registers, shared, spilled = used[name]
                threads, instructions = code.get(name, (0, []))
                loops = kernel_loops(instructions) if instructions else []
                simple = [l for l in loops if l[0] or not l[3]]
                if not any(l[0] or l[1] for l in simple):
                    simple = loops
                # of a loop around a loop of products (the heads of a group), the inner one
                main = max(
                    simple, key=lambda l: (l[0], not (l[0] and l[3]), l[1], -l[2]), default=None
                )
                yield {
                    "arch": arch,
                    "type": precision,
                    "kernel": readable[name],
                    "registers": registers,
                    "shared": shared,
                    "spilled": spilled,
                    "main": main,
                    "loops": loops,
                    "in flight": in_flight(instructions),
                    "at once": at_once(instructions),
                    "warps": warps_of(arch, threads, registers, shared) if threads else 0,
                }


def columns(row):
    main = row['main']
    hmma, size, other, inner = main or (0, 0, 0, False)
    each = other / hmma if hmma else 16.0 * other / size if size else 0.0
    return {
        **row,
        "HMMA": hmma,
        "other": other,
        "instructions": hmma + other,
        "each": each,
        "inner": inner,
    }


NVCC = tool('NVCC', '/usr/local/cuda/bin', 'nvcc')
NVDISASM = tool('NVDISASM', os.path.dirname(NVCC or ''), 'nvdisasm')


def main():
    if not NVCC:
        sys.exit(
            "sass.py: nvcc not found; it comes with the CUDA toolkit; or say NVCC=/path/to/nvcc"
        )
    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), '..'))
    pattern = sys.argv[1] if len(sys.argv) > 1 else None
    failed, met, lines, compiled = 0, set(), [], set()
    print(
        f'{"arch":5} {"type":4} {"kernel":58} {"registers":>9} {"shared":>6} {"spilled":>7} '
        f'{"warps":>5} {"HMMA":>5} {"other":>6} {"each":>6}'
    )
    with tempfile.TemporaryDirectory() as folder:
        for row in map(columns, rows(folder, pattern)):
            print(
                f'sm_{row["arch"]:<2} {row["type"]:4} {row["kernel"]:58} {row["registers"]:9} '
                f'{row["shared"]:6} {row["spilled"]:7} {row["warps"] or "-":>5} '
                f'{row["HMMA"] or "-":>5} {row["other"] or "-":>6}'
                f'{"+" if row["inner"] else " "}{row["each"]:6.1f}'
            )
            if pattern:
                for loop in sorted(row['loops'], reverse=True):
                    print(
                        f'{"":10} loop: {loop[0]} HMMA, {loop[1]} bytes, '
                        f'{loop[2]} other instructions'
                        f'{", with a loop inside" if loop[3] else ""}'
                    )
                print(
                    f'{"":10} loads in flight at a barrier: {row["in flight"]}, '
                    f'at once: {row["at once"]}'
                )
            compiled.add(re.match(r'\w+', row['kernel'])[0])
            if row['spilled']:
                print(f'FAIL {row["kernel"]} spills {row["spilled"]} bytes')
                failed += 1
            if not NVDISASM:
                continue
            for sign, (kernel, precision, column, bound) in [(1, b) for b in BUDGETS] + [
                (-1, f) for f in FLOORS
            ]:
                if precision != row['type'] or kernel != row['kernel']:
                    continue
                met.add((kernel, row['arch']))
                if sign * row[column] > sign * bound:
                    print(
                        f'FAIL {kernel}: {column} is {row[column]}, '
                        f'at {"most" if sign > 0 else "least"} {bound}'
                    )
                    failed += 1
            for what, kernel, precision, threads, least in OCCUPANCY:
                if precision != row['type'] or kernel != row['kernel']:
                    continue
                met.add((what, row['arch']))
                warps = warps_of(row['arch'], threads, row['registers'], row['shared'])
                lines.append(
                    f'{"ok  " if warps >= least else "FAIL"} {what}, sm_{row["arch"]}: '
                    f'blocks of {threads} '
                    f"threads, {warps} warps on a multiprocessor, at least {least}"
                )
                failed += warps < least
    print('\n'.join(lines))
    whole = not pattern and 'PRECISIONS' not in os.environ
    for kernel in sorted(declared() - compiled) if whole else []:
        print(f'FAIL {kernel} was not compiled: no function launches it')
        failed += 1
    if not NVDISASM:
        print(
            f"{len(compiled)} kernels, {failed} failed; budgets were not checked without nvdisasm: "
            "it comes with the CUDA toolkit and the PyPI package nvidia-cuda-nvdisasm; "
            "or say NVDISASM=/path/to/nvdisasm"
        )
    elif whole:
        lacking = {first for first, *_ in BUDGETS + FLOORS + OCCUPANCY} - {
            first for first, _ in met
        }
        for kernel in sorted(lacking):
            print(f'FAIL {kernel} has a budget and was not compiled')
        failed += len(lacking)
        print(
            f"{len(BUDGETS) + len(FLOORS) + len(OCCUPANCY)} budgets for each architecture, "
            f"{failed} failed"
        )
    return 1 if failed else 0


if __name__ == '__main__':
    sys.exit(main())
