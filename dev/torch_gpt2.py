#!/usr/bin/env python3
"""GPT-2 124M as PyTorch trains it best: what train_gpt's tokens/s are compared with. torch.compile,
bf16 autocast on a GPU and fp32 on a CPU, scaled_dot_product_attention, fused AdamW, gradient
clipping, random tokens; the same batch and vocabulary (padded to 50304). Prints the median step,
and the time of the attention alone. On a CPU it prints a line a step, for dev/cpu_speed.py."""

import argparse
import math
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, channels, heads):
        super().__init__()
        self.heads = heads
        self.ln1 = nn.LayerNorm(channels)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.proj = nn.Linear(channels, channels)
        self.ln2 = nn.LayerNorm(channels)
        self.fc = nn.Linear(channels, 4 * channels)
        self.fcproj = nn.Linear(4 * channels, channels)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (
            self.qkv(self.ln1(x)).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.fcproj(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, layers, heads, channels, vocab, seq):
        super().__init__()
        self.wte = nn.Embedding(vocab, channels)
        self.wpe = nn.Embedding(seq, channels)
        self.blocks = nn.ModuleList(Block(channels, heads) for _ in range(layers))
        self.lnf = nn.LayerNorm(channels)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.lnf(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def timed(step, count, warmup, synchronize):
    """The median seconds of a step."""
    times = []
    for i in range(count):
        synchronize()
        begin = time.perf_counter()
        step()
        synchronize()
        if i >= warmup:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def time_attention(args, device, dtype, synchronize):
    shape = (args.micro_batch, args.heads, args.seq, args.channels // args.heads)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    gradient = torch.randn(shape, device=device, dtype=dtype)
    with torch.no_grad():
        forward = timed(
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            args.steps,
            args.warmup,
            synchronize,
        )
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    backward = timed(
        lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True),
        args.steps,
        args.warmup,
        synchronize,
    )
    print(
        f"PyTorch {torch.__version__} attention, B {args.micro_batch}, T {args.seq}, "
        f"NH {args.heads}, "
        f"HS {shape[-1]}, {dtype}: forward {1e3 * forward:.3f} ms, backward {1e3 * backward:.3f} ms"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("micro-batch", 32),
        ("seq", 1024),
        ("steps", 40),
        ("warmup", 10),
        ("layers", 12),
        ("heads", 12),
        ("channels", 768),
        ("vocab", 50257),
    ):
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", type=int, default=1)
    args = parser.parse_args()
    if args.steps <= args.warmup:
        parser.error("--steps must be more than --warmup")
    cuda = args.device.startswith("cuda")
    synchronize = torch.cuda.synchronize if cuda else lambda: None
    torch.manual_seed(0)
    if cuda:
        torch.set_float32_matmul_precision("high")

    padded = math.ceil(args.vocab / 128) * 128
    model = GPT2(args.layers, args.heads, args.channels, padded, args.seq).to(args.device)
    decay = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1e-4,
        betas=(0.9, 0.95),
        fused=True,
    )
    compiled = torch.compile(model) if args.compile else model
    tokens = torch.randint(args.vocab, (args.micro_batch, args.seq + 1), device=args.device)

    def step():
        with torch.autocast(args.device.split(":")[0], dtype=torch.bfloat16, enabled=cuda):
            loss = compiled(tokens[:, :-1], tokens[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not cuda:
            print("step", flush=True)

    seconds = timed(step, args.steps, args.warmup, synchronize)
    device = torch.cuda.get_device_name() if cuda else args.device
    parameters = sum(p.numel() for p in model.parameters())
    precision = "bf16 autocast" if cuda else "fp32"
    print(
        f"PyTorch {torch.__version__}, {device}: GPT-2 with {parameters:,} parameters, "
        f"B {args.micro_batch}, T {args.seq}, {precision}, "
        f"the median step: {1e3 * seconds:.1f} ms, "
        f"{args.micro_batch * args.seq / seconds:.0f} tokens/s"
    )
    time_attention(args, args.device, torch.bfloat16 if cuda else torch.float32, synchronize)


if __name__ == "__main__":
    main()
