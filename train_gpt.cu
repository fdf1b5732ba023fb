// train_gpt.cu: trains GPT-2 on one GPU, or on none. The first of four trainers, each the one before plus one idea.
//
// Letters: B micro-batch (sequences), T sequence length, N = B*T tokens, C channels, L layers, NH heads, V vocabulary,
// Vp the same padded to 128. A rank has Nl rows of the residual stream, A channels of heads, F hidden units, Vl of Vp.
// A shape stands behind every pointer. Weights are [in, out]: w[QKVW] is one of a layer, dw[QKVW] its gradient
// (llmc/model.h). One rank has everything: Nl = N, A = C, F = 4C, Vl = Vp.

// Trainer: everything but the mathematics: options, memory, data, optimizer, checkpoints, log, timeline
#include "llmc/trainer.cuh"
#include "llmc/kernels/attention.cuh"
#include "llmc/kernels/classifier.cuh"
#include "llmc/kernels/encoder.cuh"
#include "llmc/kernels/gelu.cuh"
#include "llmc/kernels/layernorm.cuh"
#include "llmc/kernels/matmul.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// The model and its memory

// Activations of one layer: its forward pass keeps them for its backward pass.
struct LayerActs {
    Layernorm ln1;                 // (Nl, C), with mean and rstd (Nl)
    floatX *qkv;                   // (N, 3A)
    float *lse;                    // (B, NH, T) of attention: log-sum-exp of the scores
    floatX *atty;                  // (N, A)
    floatX *residual2;             // (Nl, C) residual stream between the two halves
    Layernorm ln2;                 // (Nl, C)
    floatX *fch, *fch_gelu;        // (N, F) before and after GELU
};

// Activations of one micro-batch, kept from its forward to its backward pass.
struct Acts {
    LayerActs *layers;             // [L]
    floatX **residual;             // [L + 1] of (Nl, C): input of layer l; the last is the input of ln_f
    Layernorm lnf;                 // (Nl, C)
};

struct GPT : Trainer {
    Acts acts;                     // of the current micro-batch
    floatX *logits;                // (N, Vl), then their gradient
    float *row_max, *row_sums;     // (N) and (2, N): maximum, sum of exponentials and target logit of each token
    floatX *proj;                  // (N, C) output of a projection; in backward the masked gradient with dropout
    floatX *reduced;               // (Nl, C) the same, ready for its bias and the residual: proj itself on one rank
    floatX *dresidual;             // (Nl, C) gradient of the residual stream
    floatX *dnorm;                 // (N, C) gradient of a layernorm's output, and (N, A) of atty
    floatX *dreduced;              // (Nl, C) the same, ready for the layernorm: dnorm itself on one rank
    floatX *dqkv;                  // (N, 3A)
    floatX *dfch;                  // (N, F)
    float *dattention;             // (B, NH, T) scratch
    float *reduce_scratch;         // for the two-stage column sums
};

// Takes memory for the activations of one micro-batch. With recomputation the layers share those of the first one.
static void layout_acts(GPT *m, Arena *arena, Acts *acts) {
    size_t N = m->B * m->T, Nl = N / m->sp, C = m->config.C, A = m->A, F = m->F, L = m->config.L;
    host_array(acts->layers, L), host_array(acts->residual, L + 1);
    for (size_t l = 0; l <= L; l++) take(arena, acts->residual[l], Nl * C);
    for (size_t l = 0; l < L; l++) {
        LayerActs *a = &acts->layers[l], *first = &m->acts.layers[0];
        int again = a == first ? RECOMPUTE_NONE : m->opt.recompute;  // what backward computes again
        *a = *first;
        if (again < RECOMPUTE_LAYER) take(arena, a->lse, N * m->NHl), take(arena, a->atty, N * A);
        if (again < RECOMPUTE_GELU) take(arena, a->fch_gelu, N * F);
        if (again >= RECOMPUTE_BUT_ATTENTION) continue;
        take_layernorm(arena, &a->ln1, Nl, C), take_layernorm(arena, &a->ln2, Nl, C);
        take(arena, a->qkv, N * 3 * A), take(arena, a->residual2, Nl * C), take(arena, a->fch, N * F);
    }
    take_layernorm(arena, &acts->lnf, Nl, C);
}

// Takes memory for every buffer: called once to count bytes, and once to set pointers.
static void layout(GPT *m) {
    size_t N = m->B * m->T, Nl = N / m->sp, C = m->config.C, A = m->A, F = m->F;
    Arena *arena = trainer_layout(m);
    take(arena, m->logits, N * m->Vl);
    take(arena, m->row_max, N), take(arena, m->row_sums, 2 * N);
    take(arena, m->proj, N * C), take(arena, m->dresidual, Nl * C), take(arena, m->dnorm, N * C);
    m->reduced = m->proj, m->dreduced = m->dnorm;
    take(arena, m->dqkv, N * 3 * A), take(arena, m->dfch, N * F), take(arena, m->dattention, N * m->NHl);
    take(arena, m->reduce_scratch, reduce_scratch_floats(N, C, F));
    layout_acts(m, arena, &m->acts);
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward and backward

// One layer: x (Nl, C) -> out (Nl, C).
static void layer_forward(GPT *m, size_t l, LayerActs *a, floatX *out, const floatX *x, size_t B, size_t T) {
    size_t N = B * T, Nl = N / m->sp, C = m->config.C, A = m->A, F = m->F;
    floatX **w = m->w[l];
    cudaStream_t s = m->stream;
    layernorm_forward(a->ln1, x, w[LN1W], w[LN1B], Nl, C, s);
    matmul_forward(&m->matmul, a->qkv, a->ln1.out, w[QKVW], w[QKVB], N, C, 3 * A);
    if (out || m->opt.recompute != RECOMPUTE_BUT_ATTENTION)  // which has kept what attention wrote
        attention_forward(a->atty, a->lse, a->qkv, B, T, A, m->NHl, s, drop(m, DROPOUT_SCORES, l));
    matmul_forward(&m->matmul, m->proj, a->atty, w[PROJW], NULL, N, A, C);
    layernorm_residual_forward(a->residual2, a->ln2, x, m->reduced, w[PROJB], w[LN2W], w[LN2B], Nl, C, s,
                               drop(m, DROPOUT_PROJ, l));
    matmul_forward(&m->matmul, a->fch, a->ln2.out, w[FCW], w[FCB], N, C, F);
    gelu_forward(a->fch_gelu, a->fch, N * F, s);
    if (!out) return;  // recomputation: backward reads nothing of what follows
    matmul_forward(&m->matmul, m->proj, a->fch_gelu, w[FCPROJW], NULL, N, F, C);
    residual_forward(out, a->residual2, m->reduced, w[FCPROJB], Nl, C, s, drop(m, DROPOUT_FCPROJ, l));
}

// One layer: dresidual (Nl, C), the gradient of its output, becomes the gradient of its input x. The first micro-batch
// writes weight gradients and the others add to them (add).
static void layer_backward(GPT *m, size_t l, LayerActs *a, const floatX *x, bool add) {
    size_t B = m->B, T = m->T, N = B * T, Nl = N / m->sp, C = m->config.C, A = m->A, F = m->F;
    floatX **w = m->w[l], *dresidual = m->dresidual;
    float **dw = m->dw[l], *scratch = m->reduce_scratch;
    cudaStream_t s = m->stream;
    if (m->opt.recompute >= RECOMPUTE_BUT_ATTENTION) layer_forward(m, l, a, NULL, x, B, T);
    if (m->opt.recompute == RECOMPUTE_GELU) gelu_forward(a->fch_gelu, a->fch, N * F, s);
    // the MLP
    const floatX *dout = dropout_backward(m->proj, dresidual, drop(m, DROPOUT_FCPROJ, l), Nl, C, s);
    matmul_backward_input(&m->matmul, m->dfch, dout, w[FCPROJW], N, F, C);
    matmul_backward_weight(&m->matmul, dw[FCPROJW], a->fch_gelu, dout, N, F, C, add);
    bias_backward(dw[FCPROJB], dout, scratch, N, C, add, s);
    gelu_backward(m->dfch, dw[FCB], scratch, m->dfch, a->fch, N, F, add, s);
    matmul_backward_input(&m->matmul, m->dnorm, m->dfch, w[FCW], N, C, F);
    matmul_backward_weight(&m->matmul, dw[FCW], a->ln2.out, m->dfch, N, C, F, add);
    layernorm_backward(dresidual, dw[LN2W], dw[LN2B], scratch, dresidual, m->dreduced, a->residual2, w[LN2W],
                       a->ln2, Nl, C, add, s);
    // the attention
    dout = dropout_backward(m->proj, dresidual, drop(m, DROPOUT_PROJ, l), Nl, C, s);
    matmul_backward_input(&m->matmul, m->dnorm, dout, w[PROJW], N, A, C);
    matmul_backward_weight(&m->matmul, dw[PROJW], a->atty, dout, N, A, C, add);
    bias_backward(dw[PROJB], dout, scratch, N, C, add, s);
    attention_backward(m->dqkv, m->dattention, m->dnorm, a->atty, a->lse, a->qkv, B, T, A, m->NHl, s,
                       drop(m, DROPOUT_SCORES, l));
    matmul_backward_input(&m->matmul, m->dnorm, m->dqkv, w[QKVW], N, C, 3 * A);
    matmul_backward_weight(&m->matmul, dw[QKVW], a->ln1.out, m->dqkv, N, C, 3 * A, add);
    bias_backward(dw[QKVB], m->dqkv, scratch, N, 3 * A, add, s);
    layernorm_backward(dresidual, dw[LN1W], dw[LN1B], scratch, dresidual, m->dreduced, x, w[LN1W], a->ln1,
                       Nl, C, add, s);
}

// Tokens (B, T) -> lnf (Nl, C).
static void forward(GPT *m, Acts *acts, const int *inputs, size_t B, size_t T, int micro) {
    size_t N = B * T, Nl = N / m->sp, C = m->config.C, L = m->config.L;
    floatX **w = m->w[0], *x = acts->residual[0];
    Span span(m, m->stream, "forward", micro);
    encoder_forward(x, inputs, w[WTE], w[WPE], B, T, C, m->V0, m->Vl, m->stream);
    dropout_forward(x, drop(m, DROPOUT_EMBEDDING, 0), Nl, C, m->stream);
    for (size_t l = 0; l < L; l++)
        layer_forward(m, l, &acts->layers[l], acts->residual[l + 1], acts->residual[l], B, T);
    layernorm_forward(acts->lnf, acts->residual[L], w[LNFW], w[LNFB], Nl, C, m->stream);
}

// lnf (Nl, C) -> the sum of the micro-batch's losses; to train, the logits become their gradient, and dresidual (Nl, C)
// that of the last layer's output, both of the step's mean loss.
static void loss(GPT *m, Acts *acts, const int *targets, int micro, bool training) {
    size_t N = m->B * m->T, Nl = N / m->sp, C = m->config.C, V = m->config.V, L = m->config.L;
    floatX **w = m->w[0];
    float **dw = m->dw[0], *sum = m->row_sums, *target = m->row_sums + N, *losses = m->losses + micro * 2 * N;
    bool add = micro > 0;
    Span span(m, m->stream, "loss", micro);
    linear_forward(&m->matmul, m->logits, acts->lnf.out, w[WTE], NULL, N, C, m->Vl);
    classifier_stats(m->row_max, sum, target, m->logits, targets, N, V, m->Vl, m->V0, m->stream);
    classifier_gradient(losses, m->logits, m->row_max, sum, target, targets, m->dloss, N, V, m->Vl, m->V0, training,
                        m->stream);
    loss_sum(&m->loss_sums[micro], losses, N, m->stream);
    if (!training) return;
    linear_backward_input(&m->matmul, m->dnorm, m->logits, w[WTE], N, C, m->Vl);
    linear_backward_weight(&m->matmul, dw[WTE], acts->lnf.out, m->logits, N, C, m->Vl, add);
    layernorm_backward(m->dresidual, dw[LNFW], dw[LNFB], m->reduce_scratch, NULL, m->dreduced, acts->residual[L],
                       w[LNFW], acts->lnf, Nl, C, add, m->stream);
}

// dresidual (Nl, C), which loss() has left -> gradients of the layers and of the embeddings.
static void backward(GPT *m, Acts *acts, const int *inputs, int micro) {
    size_t B = m->B, T = m->T, Nl = B * T / m->sp, C = m->config.C, L = m->config.L;
    floatX *dx = m->dresidual;
    bool add = micro > 0;
    Span span(m, m->stream, "backward", micro);
    for (size_t l = L; l-- > 0;) layer_backward(m, l, &acts->layers[l], acts->residual[l], add);
    const floatX *dout = dropout_backward(dx, dx, drop(m, DROPOUT_EMBEDDING, 0), Nl, C, m->stream);
    encoder_backward(m->dw[0][WTE], m->dw[0][WPE], dout, inputs, B, T, C, m->config.maxT, m->V0, m->Vl, add, m->stream);
}

// Runs all micro-batches of the global batch: with backward to train, without to validate.
static void run_batch(GPT *m, bool training) {
    for (size_t micro = 0; micro < m->micros; micro++) {
        size_t at = micro * m->B * m->T;
        dropout_at(m, micro);
        forward(m, &m->acts, m->inputs + at, m->B, m->T, micro);
        loss(m, &m->acts, m->targets + at, micro, training);
        if (training) backward(m, &m->acts, m->inputs + at, micro);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The run

// One step: forward, backward and update over the next global batch.
static void train_step(GPT *m) {
    StepReport report = trainer_begin_step(m);
    run_batch(m, true);
    trainer_norm(m, &report);
    trainer_adamw(m, &report);
    trainer_end_step(m, &report);
}

// Appends one token to the sample: the logits after the last of its T tokens say which.
static void sample_token(GPT *m) {
    size_t C = m->config.C, last = m->sample.T - 1;
    forward(m, &m->acts, m->inputs, 1, m->sample.padded, NO_MICRO);
    linear_forward(&m->matmul, m->logits, m->acts.lnf.out + last * C, m->w[0][WTE], NULL, 1, C, m->Vl);
    sample_append(m, m->logits);
}

int main(int argc, char **argv) {
    static GPT gpt, *m = &gpt;
    trainer_open(m, argc, argv);  // bad input ends here
    trainer_shard(m, shard_whole(&m->config));
    trainer_allocate(m, layout);
    trainer_start(m);

    for (;;) {  // validation, save and sample if they are due, then one more step
        while (validation_goes_on(m)) run_batch(m, false);
        if (save_due(m)) trainer_save(m);
        while (sample_goes_on(m)) sample_token(m);
        if (is_last_step(m)) break;
        train_step(m);
    }
    return trainer_close(m);
}
