// reference_muon.h: Muon in plain C loops and fp64. AdamW updates all other tensors.
// lesson: muon
//
// The momentum of a matrix takes the place of AdamW's first moment.
//
// defines: reference_orthogonalise, reference_is_matrix, reference_muon
#ifndef LLMC_REFERENCE_MUON_H
#define LLMC_REFERENCE_MUON_H

#include "llmc/reference.h"

// out[m, n] = a[m, k] b[k, n].
static inline void reference_product(double *out, const double *a, const double *b, size_t m,
                                     size_t n, size_t k) {
    memset(out, 0, m * n * sizeof(double));
    for (size_t i = 0; i < m; i++)
        for (size_t l = 0; l < k; l++)
            for (size_t j = 0; j < n; j++) out[i * n + j] += a[i * k + l] * b[l * n + j];
}

static inline void reference_transpose(double *out, const double *x, size_t rows,
                                       size_t cols) {
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < cols; j++) out[j * rows + i] = x[i * cols + j];
}

// Replaces x[rows, cols] by an almost orthogonal matrix with its singular vectors. Divides it
// by its norm, and takes `steps` steps of Newton-Schulz on the wide one of x and x'.
static inline void reference_orthogonalise(double *x, size_t rows, size_t cols,
                                           size_t steps) {
    size_t m = rows > cols ? cols : rows, n = rows > cols ? rows : cols;
    double *wide = reference_allocate(m * n), *turned = reference_allocate(m * n);
    double *square = reference_allocate(m * m), *fourth = reference_allocate(m * m);
    double sum = 0;
    if (rows > cols) reference_transpose(wide, x, rows, cols);
    else memcpy(wide, x, m * n * sizeof(double));
    for (size_t i = 0; i < m * n; i++) sum += wide[i] * wide[i];
    for (size_t i = 0; i < m * n; i++) wide[i] /= sqrt(sum) + 1e-7;

    for (size_t step = 0; step < steps; step++) {
        reference_transpose(turned, wide, m, n);
        reference_product(square, wide, turned, m, m, n);
        reference_product(fourth, square, square, m, m, m);
        for (size_t i = 0; i < m * m; i++)
            fourth[i] = -4.7750 * square[i] + 2.0315 * fourth[i];
        reference_product(turned, fourth, wide, m, n, m);
        for (size_t i = 0; i < m * n; i++) wide[i] = 3.4445 * wide[i] + turned[i];
    }

    if (rows > cols) reference_transpose(x, wide, m, n);
    else memcpy(x, wide, m * n * sizeof(double));
    free(wide);
    free(turned);
    free(square);
    free(fourth);
}

// Returns true if Muon updates the tensor: a weight matrix of a layer.
static inline bool reference_is_matrix(const Tensor *x) {
    int kind = x->spec->kind;
    return kind == QKVW || kind == PROJW || kind == FCW || kind == FCPROJW;
}

// Updates the matrix of cols columns from `first` on in the tensor x.
static inline void reference_muon_matrix(Reference *ref, const Tensor *x, size_t first,
                                         size_t cols, double mu, size_t steps, double lr,
                                         double weight_decay, double grad_scale) {
    double *update = reference_allocate(x->rows * cols);
    double factor = 0.2 * sqrt((double)(x->rows > cols ? x->rows : cols));
    for (size_t i = 0; i < x->rows * cols; i++) {
        size_t at = x->offset + i / cols * x->cols + first + i % cols;
        double g = ref->grads[at] * grad_scale;
        ref->m[at] = mu * ref->m[at] + (1.0 - mu) * g;
        update[i] = mu * ref->m[at] + (1.0 - mu) * g;
    }
    reference_orthogonalise(update, x->rows, cols, steps);
    for (size_t i = 0; i < x->rows * cols; i++) {
        double *w = &ref->params[x->offset + i / cols * x->cols + first + i % cols];
        *w -= lr * (factor * update[i] + weight_decay * *w);
    }
    free(update);
}

// Updates all tensors once: Muon the matrices of layers, with q, k and v as three, and
// AdamW all others. The other arguments are reference_adamw's.
static inline void reference_muon(Reference *ref, double mu, size_t steps, size_t step,
                                  double lr, double beta1, double beta2, double eps,
                                  double weight_decay, double grad_scale) {
    Reference rest = *ref;
    rest.table.tensors = (Tensor *)host_alloc(ref->table.count, sizeof(Tensor));
    rest.table.count = 0;
    for (size_t k = 0; k < ref->table.count; k++) {
        const Tensor *x = &ref->table.tensors[k];
        size_t cols = x->spec->kind == QKVW ? x->cols / 3 : x->cols;
        if (!reference_is_matrix(x)) {
            rest.table.tensors[rest.table.count++] = *x;
            continue;
        }
        for (size_t first = 0; first < x->cols; first += cols)
            reference_muon_matrix(ref, x, first, cols, mu, steps, lr, weight_decay,
                                  grad_scale);
    }
    reference_adamw(&rest, step, lr, beta1, beta2, eps, weight_decay, grad_scale);
    free(rest.table.tensors);
}

#endif
