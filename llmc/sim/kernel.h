// kernel.h: what a kernel's wrapper says of its next launch: the kind of work, the bytes that it must move and the
// FLOPs that it does (llmc/kernels/cost.cuh says what is counted).
//
// defines: KernelKind, KernelWork
#ifndef LLMC_SIM_KERNEL_H
#define LLMC_SIM_KERNEL_H

#include <stdbool.h>
#include <stddef.h>

// A cluster file has a rate for each kind. Of the elements of some it says more: a residual or an embedding is followed
// by dropout where the software has that, and the bytes of an update, a logit and the gradients around a layernorm are
// the software's own.
typedef enum {
    KERNEL_NONE,                // takes no time beside its launch: another kernel's cost has it in
    KERNEL_ELEMENTWISE,
    KERNEL_EXPONENTIAL,         // elementwise too, but with an exponential for each element, as softmax has
    KERNEL_RESIDUAL,
    KERNEL_RESIDUAL_LAYERNORM,  // both in one, forward: 4 values an element
    KERNEL_LAYERNORM_FORWARD,
    KERNEL_LAYERNORM_BACKWARD,
    KERNEL_RESIDUAL_BACKWARD,   // a layernorm's too, with the residual's gradient added: 4 values an element
    KERNEL_CLASSIFIER_FORWARD,  // elements: logits
    KERNEL_CLASSIFIER_BACKWARD,
    KERNEL_OPTIMIZER,   // elements: parameters
    KERNEL_ATTENTION_FORWARD,
    KERNEL_ATTENTION_BACKWARD,
    KERNEL_GEMM,
    KERNEL_COPY,
    KERNEL_KINDS
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
