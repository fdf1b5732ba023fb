// kernel.h: the work of a kernel's next launch, as its wrapper states it. That is its kind,
// the bytes that it must move and its FLOPs (llmc/kernels/work.cuh says how they are
// counted).
//
// defines: KernelKind, KernelWork
#ifndef LLMC_SIM_KERNEL_H
#define LLMC_SIM_KERNEL_H

#include <stdbool.h>
#include <stddef.h>

// A cluster file has a rate for each kind. For some kinds it also gives bytes: of dropout's
// masks behind a residual or an embedding, of an update and of a logit.
typedef enum {
    KERNEL_NONE,  // no time beside its launch: part of another kernel's cost
    KERNEL_ELEMENTWISE,
    KERNEL_EXPONENTIAL,  // elementwise too, but with an exponential for each element, as
                         // softmax has
    KERNEL_RESIDUAL,
    KERNEL_RESIDUAL_LAYERNORM,  // both in one, forward: 4 values an element
    KERNEL_LAYERNORM_FORWARD,
    KERNEL_LAYERNORM_BACKWARD,
    KERNEL_CLASSIFIER,  // forward or backward; elements: logits
    KERNEL_OPTIMIZER,   // elements: parameters
    KERNEL_ATTENTION_FORWARD,
    KERNEL_ATTENTION_BACKWARD,
    KERNEL_GEMM,
    KERNEL_COPY
} KernelKind;

typedef struct {
    KernelKind kind;
    double elements, bytes, flops;
    size_t B, T, NH, HS;  // of attention
    size_t M, N, K;       // of a matrix product
    bool accumulates;     // likewise: the result is added to what is there
    size_t width;         // bytes of an element of attention and of a product's factors
} KernelWork;

#endif
