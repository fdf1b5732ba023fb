#!/usr/bin/env python3
"""Makes dev/test/golden/muon.json: six steps of Muon and AdamW by PyTorch in float64.

    golden_muon.py > dev/test/golden/muon.json

The model is that of dev/test/golden. GPT-2 is written here from its paper, Muon from its own
(Jordan et al. 2024; the factor of the update from Liu et al. 2025). Gradients and AdamW are
PyTorch's. Of every tensor the file has two numbers: its L2 norm, and its product with numbers of
a small generator that dev/test/test_muon.c has too. Needs the package torch from PyPI; a machine
without a GPU will do.
"""

import sys

if {"-h", "--help"} & set(sys.argv[1:]):
    sys.exit(print(__doc__))

import json
import math
import os
import struct

import torch

torch.set_default_dtype(torch.float64)

GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "test", "golden")
RUN = {
    "seq": 16,
    "global_batch": 8,
    "steps": 6,
    "lr": 0.003,
    "weight_decay": 0.1,
    "clip": 0.9,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "momentum": 0.95,
    "newton_schulz": 5,
}
MATRICES = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def read_model():
    with open(os.path.join(GOLDEN, "model.safetensors"), "rb") as file:
        data = file.read()
    length = struct.unpack("<Q", data[:8])[0]
    weights = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + at for at in entry["data_offsets"])
        values = struct.unpack(f"<{(end - begin) // 4}f", data[begin:end])
        weights[name] = torch.tensor(values).reshape(entry["shape"]).requires_grad_()
    return weights


def read_tokens():
    with open(os.path.join(GOLDEN, "train.bin"), "rb") as file:
        data = file.read()[1024:]
    return torch.tensor(struct.unpack(f"<{len(data) // 2}H", data))


def loss_of(w, layers, heads, inputs, targets):
    B, T = inputs.shape
    C = w["wte.weight"].shape[1]
    norm = lambda x, name: torch.nn.functional.layer_norm(
        x, (C,), w[name + ".weight"], w[name + ".bias"], 1e-5
    )
    linear = lambda x, name: x @ w[name + ".weight"] + w[name + ".bias"]
    split = lambda x: x.reshape(B, T, heads, C // heads).transpose(1, 2)
    hidden = torch.full((T, T), -math.inf).triu(1)
    x = w["wte.weight"][inputs] + w["wpe.weight"][:T]
    for layer in range(layers):
        at = f"h.{layer}."
        q, k, v = map(split, linear(norm(x, at + "ln_1"), at + "attn.c_attn").split(C, -1))
        scores = q @ k.transpose(2, 3) / math.sqrt(C // heads) + hidden
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C)
        x = x + linear(y, at + "attn.c_proj")
        y = linear(norm(x, at + "ln_2"), at + "mlp.c_fc")
        x = x + linear(torch.nn.functional.gelu(y, approximate="tanh"), at + "mlp.c_proj")
    logits = norm(x, "ln_f") @ w["wte.weight"].T
    return torch.nn.functional.cross_entropy(logits.reshape(B * T, -1), targets.reshape(-1))


def orthogonal(update):
    x = update / (update.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(RUN["newton_schulz"]):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if tall else x


def muon(weight, momentum, gradient):
    mu, lr = RUN["momentum"], RUN["lr"]
    momentum.mul_(mu).add_((1 - mu) * gradient)
    update = orthogonal((1 - mu) * gradient + mu * momentum)
    factor = 0.2 * math.sqrt(max(weight.shape))
    weight.sub_(lr * (factor * update + RUN["weight_decay"] * weight))


def numbers(tensors):
    """Of every tensor its norm and its product with the generator's numbers from the start."""
    out = {}
    for name, x in tensors.items():
        state, noise = 7, []
        for _ in range(x.numel()):
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            noise.append((state >> 11) / 4503599627370496.0 - 1.0)
        flat = x.detach().reshape(-1)
        out[name] = [flat.norm().item(), (flat @ torch.tensor(noise)).item()]
    return out


def main():
    with open(os.path.join(GOLDEN, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    w, tokens, T, B = read_model(), read_tokens(), RUN["seq"], RUN["global_batch"]
    matrices = [x for name, x in w.items() if name.endswith(MATRICES)]
    momenta = [torch.zeros_like(x) for x in matrices]
    others = [x for name, x in w.items() if not name.endswith(MATRICES)]
    groups = [
        {"params": [x for x in others if x.dim() == 2], "weight_decay": RUN["weight_decay"]},
        {"params": [x for x in others if x.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(
        groups, lr=RUN["lr"], betas=(RUN["beta1"], RUN["beta2"]), eps=RUN["eps"]
    )
    out = {**RUN, "losses": [], "grad_norms": []}
    for step in range(RUN["steps"]):
        batch = tokens[step * B * T : (step + 1) * B * T + 1]
        inputs, targets = batch[:-1].reshape(B, T), batch[1:].reshape(B, T)
        for x in w.values():
            x.grad = None
        loss = loss_of(w, config["n_layer"], config["n_head"], inputs, targets)
        loss.backward()
        gradients = {name: x.grad for name, x in w.items()}
        norm = math.sqrt(sum((g * g).sum().item() for g in gradients.values()))
        out["losses"].append(loss.item())
        out["grad_norms"].append(norm)
        if step in (0, RUN["steps"] - 1):
            out["first" if step == 0 else "last"] = numbers(gradients)
        with torch.no_grad():
            for x in w.values():
                x.grad.mul_(min(1.0, RUN["clip"] / norm))
            adamw.step()
            for x, momentum in zip(matrices, momenta):
                parts = 3 if x.shape[1] == 3 * x.shape[0] else 1  # q, k and v
                columns = [y.chunk(parts, 1) for y in (x, momentum, x.grad)]
                for weight, m, gradient in zip(*columns):
                    muon(weight, m, gradient)
    out["weights"] = numbers(w)
    text = json.dumps(out, separators=(", ", ": "))
    print(text.replace('"losses"', '\n"losses"').replace("], ", "],\n"))


main()
