#!/usr/bin/env python3
"""calibrate_gpu.py NAME BENCH.jsonl BASE.json [KEY VALUE SOURCE]...: prints a cluster file whose
device is the GPU on which `make bench` wrote BENCH.jsonl. Only the rows of llmc's own kernels in
bf16 count. Constants that no row measures (links, attention without flash, the host) are BASE's
with their sources, or those of the last arguments.

`make calibrate DEVICE=cuda` runs it. dev/clusters/h200-1.json is its output for
dev/results/h200-2026-11-27-bench.jsonl, and dev/test/run_calibrate.sh makes it again.
"""

import sys

if {"-h", "--help"} & set(sys.argv[1:]):
    sys.exit(print(__doc__))
if len(sys.argv) < 4 or len(sys.argv) % 3 != 1:
    print(
        "usage: calibrate_gpu.py NAME BENCH.jsonl BASE.json [KEY VALUE SOURCE]...", file=sys.stderr
    )
    sys.exit(2)

import json
import math
import re
import statistics


def refuse(sentence):
    print(f'calibrate_gpu.py: {sentence}', file=sys.stderr)
    sys.exit(2)


class Rows:
    """The rows of llmc's kernels, by operation."""

    def __init__(self, path):
        with open(path) as file:
            rows = [json.loads(line) for line in file if line.strip()]
        self.all = [r for r in rows if '(llmc)' in r['kernel'] and r['precision'] == 'bf16']
        if not self.all:
            refuse(f'{path} has no rows of llmc\'s kernels in bf16: run `make bench` on a GPU')
        devices = {r['device'] for r in self.all}
        if len(devices) > 1:
            refuse(f'{path} has rows of several devices: {", ".join(sorted(devices))}')
        self.device = devices.pop()

    def of(self, *operations):
        found = [r for r in self.all if r['operation'] in operations]
        lacking = set(operations) - {r['operation'] for r in found}
        if lacking:
            refuse(f'no row of {", ".join(sorted(lacking))}')
        return found

    def median(self, key):
        return statistics.median(r[key] for r in self.all)

    def bandwidth(self, *operations):
        """Bytes a second over all rows of some operations."""
        rows = self.of(*operations)
        return sum(r['must_bytes'] for r in rows) / sum(1e-3 * r['ms'] for r in rows)


def products(rows):
    """[(M, N, K, seconds)] of the timed products whose text has a shape, and of the product that
    measures the peak."""
    found = [(8192, 8192, 8192, 2 * 8192 ** 3 / (1e12 * rows.median('peak_tflop_per_s')))]
    for row in rows.of('matmul forward', 'matmul backward input', 'matmul backward weight'):
        shape = re.search(r'(\d+) x (\d+) x (\d+)', row['kernel'])
        if shape:
            n, c, oc = map(int, shape.groups())
            m = {"matmul forward": (n, oc, c), "matmul backward input": (n, c, oc)}.get(
                row["operation"], (oc, c, n)
            )
            found.append((*m, 1e-3 * row['ms']))
    return found


def gemm_seconds(h, bandwidth, m, n, k):
    """The law of llmc/sim/cost.h in bf16, at gemm_efficiency 1 and gemm_sustained 1, less the
    start."""
    rate = h['peak_bf16']['value'] / h['sms']['value']
    wave, depth = h['gemm_wave']['value'], h['gemm_depth']['value']
    best = math.inf
    for high, wide in (128, 128), (256, 128), (128, 256):
        even = math.ceil(m / high) * math.ceil(n / wide) / h['sms']['value']
        waves = max(even, 1) * (1 - wave) + math.ceil(even) * wave
        best = min(best, waves * 2 * high * wide * (k + depth) / rate)
    return max(best, 2 * (m * k + k * n + m * n) / bandwidth)


def text(value):
    """A value of a cluster file: true, "flash", 4.17e+12."""
    return json.dumps(value) if isinstance(value, (bool, str)) else f'{value:.6g}'


def main(name, bench, base, *given):
    rows = Rows(bench)
    with open(base) as file:
        cluster = json.load(file)
    hardware, software = cluster['hardware'], cluster['software']
    how = f'measured: {bench}, {rows.device}'

    def put(section, key, value, source):
        section[key] = {'value': float(f'{value:.4g}'), 'source': source}

    for key, value, source in zip(given[0::3], given[1::3], given[2::3]):
        put(hardware if key in hardware else software, key, float(value), source)

    cluster['name'] = name
    memory = 1e9 * rows.median('peak_gb_per_s')
    put(hardware, 'hbm_bandwidth', memory, f'{how}: a copy')
    start = hardware['gemm_start']['value']
    efficiency = statistics.median(gemm_seconds(hardware, memory, m, n, k) / (seconds - start)
                                   for m, n, k, seconds in products(rows))
    put(
        hardware,
        "gemm_efficiency",
        efficiency,
        f"{how}: the median of {len(products(rows))} products; the law's "
        f"start, waves and depth are those of {base}",
    )
    put(hardware, 'gemm_sustained', 1, 'assumption: steps are as fast as single products')

    launch = hardware['launch_device']['value']
    for key, operation in ('flash_forward', 'attention'), ('flash_backward', 'attention backward'):
        row = rows.of(operation)[0]
        rate = row['flops'] / (1e-3 * row['ms'] - launch)
        put(hardware, f'{key}_64', rate, f'{how}: {operation}')
        wide = [r for r in rows.all if r['operation'] == f'{operation}, heads of 128']
        if wide:
            rate = wide[0]['flops'] / (1e-3 * wide[0]['ms'] - launch)
        put(
            hardware,
            f"{key}_128",
            rate,
            (
                f"{how}: {operation}, heads of 128"
                if wide
                else "assumption: as heads of 64, as no row has heads of 128"
            ),
        )

    share = {
        "elementwise_efficiency": (
            "bias gradient",
            "encoder forward",
            "relu2 forward",
            "relu2 backward",
        ),
        "softmax_efficiency": (
            "gelu forward",
            "gelu backward",
            "swiglu forward",
            "swiglu backward",
        ),
        "layernorm_forward_efficiency": ("residual + layernorm", "residual + rmsnorm"),
        "layernorm_backward_efficiency": ("layernorm backward", "rmsnorm backward"),
        "optimizer_efficiency": ("adamw",),
    }
    for key, operations in share.items():
        put(
            hardware,
            key,
            min(1, rows.bandwidth(*operations) / memory),
            f'{how}: {", ".join(operations)}',
        )
    classifier = rows.of('classifier')[0]
    # Two kernels read 2 bytes a logit and then read and write 2; kernel 4 reads a row once.
    logits = classifier["must_bytes"] / (4 if classifier["number"] >= 4 else 6)
    moved = 1e-3 * classifier['ms'] * hardware['elementwise_efficiency']['value'] * memory
    put(software, 'classifier_bytes', moved / logits, f'{how}: classifier, at the elementwise rate')

    def section(constants):
        return ",\n".join(
            f'    "{key}": {{"value": {text(c["value"])}, "source": {json.dumps(c["source"])}}}'
            for key, c in constants.items()
        )

    print(f'{{\n  "name": {json.dumps(name)},\n  "hardware": {{\n{section(hardware)}\n  }},\n'
          f'  "software": {{\n{section(software)}\n  }}\n}}')


main(*sys.argv[1:])
