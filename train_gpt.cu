// train_gpt.cu: trains GPT-2 on one GPU, or on none. The first of four trainers, each the one before plus one idea:
//   train_gpt.cu -> train_gpt_tp.cu (tensor) -> train_gpt_pp.cu (pipeline) -> train_gpt_3d.cu (data, sharded optimizer)
//
// Letters: B micro-batch (sequences), T sequence length, N = B*T tokens, C channels, L layers, NH heads with A channels
// together, F hidden units of the MLP, V vocabulary, Vp the same padded to a multiple of 128, Vl the part of it that a
// rank holds. A shape stands behind every pointer. Weights are [in, out], as in Hugging Face's GPT-2: w[QKVW] is one of
// a layer, dw[QKVW] its gradient; llmc/model.h lists them. One rank has everything: A = C, F = 4C, Vl = Vp.

// Trainer: what surrounds training: options, memory, data, optimizer, checkpoints, log, timeline
#include "llmc/trainer.cuh"
// the kernels
#include "llmc/kernels/attention.cuh"
#include "llmc/kernels/classifier.cuh"
#include "llmc/kernels/encoder.cuh"
#include "llmc/kernels/gelu.cuh"
#include "llmc/kernels/layernorm.cuh"
#include "llmc/kernels/matmul.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// The model and its memory

// What the forward pass of one layer keeps for its backward pass.
struct LayerActs {
    floatX *ln1;                   // (N, C)
    float *ln1_mean, *ln1_rstd;    // (N)
    floatX *qkv;                   // (N, 3A)
    float *lse;                    // (B, NH, T) of attention: log-sum-exp of the scores
    floatX *atty;                  // (N, A)
    floatX *residual2;             // (N, C) residual stream between the two halves
    floatX *ln2;                   // (N, C)
    float *ln2_mean, *ln2_rstd;    // (N)
    floatX *fch, *fch_gelu;        // (N, F) before and after GELU
};

// What the forward pass of one micro-batch keeps until its backward pass.
struct Acts {
    LayerActs *layers;             // [L]
    floatX **residual;             // [L + 1] of (N, C): input of layer l; the last is the input of ln_f
    floatX *lnf;                   // (N, C)
    float *lnf_mean, *lnf_rstd;    // (N)
};

struct GPT : Trainer {
    Acts acts;                     // of the micro-batch that is under way
    floatX *logits;                // (N, Vl), then their gradient
    float *row_max, *row_sums;     // (N) and (2, N): maximum, sum of exponentials and target logit of each token
    floatX *proj;                  // (N, C) output of a projection before its bias and the residual are added
    floatX *dresidual;             // (N, C) gradient of the residual stream
    floatX *dnorm;                 // (N, C) gradient of a layernorm's output, and (N, A) of atty
    floatX *dqkv;                  // (N, 3A)
    floatX *dfch;                  // (N, F)
    float *dattention;             // (B, NH, T) scratch
    float *reduce_scratch;         // for the two-stage column sums
};

// Gives what one micro-batch keeps its place. Recomputation shares one buffer among the layers.
static void layout_acts(GPT *m, Arena *arena, Acts *acts) {
    size_t N = m->B * m->T, C = m->config.C, A = m->A, F = m->F, L = m->config.L;
    host_array(acts->layers, L), host_array(acts->residual, L + 1);
    for (size_t l = 0; l < L; l++) {
        LayerActs *a = &acts->layers[l], *shared = &m->acts.layers[0];
        take(arena, acts->residual[l], N * C);
        if (a != shared && m->opt.recompute == RECOMPUTE_LAYER) { *a = *shared; continue; }
        take(arena, a->ln1, N * C), take(arena, a->ln1_mean, N), take(arena, a->ln1_rstd, N);
        take(arena, a->qkv, N * 3 * A), take(arena, a->lse, N * m->NH), take(arena, a->atty, N * A);
        take(arena, a->residual2, N * C);
        take(arena, a->ln2, N * C), take(arena, a->ln2_mean, N), take(arena, a->ln2_rstd, N);
        take(arena, a->fch, N * F);
        if (a != shared && m->opt.recompute == RECOMPUTE_GELU) a->fch_gelu = shared->fch_gelu;
        else take(arena, a->fch_gelu, N * F);
    }
    take(arena, acts->residual[L], N * C);
    take(arena, acts->lnf, N * C), take(arena, acts->lnf_mean, N), take(arena, acts->lnf_rstd, N);
}

// Gives every buffer its place.
static void layout(GPT *m) {
    size_t N = m->B * m->T, C = m->config.C, A = m->A, F = m->F;
    Arena *arena = trainer_layout(m);
    take(arena, m->logits, N * m->Vl);
    take(arena, m->row_max, N), take(arena, m->row_sums, 2 * N);
    take(arena, m->proj, N * C), take(arena, m->dresidual, N * C), take(arena, m->dnorm, N * C);
    take(arena, m->dqkv, N * 3 * A), take(arena, m->dfch, N * F), take(arena, m->dattention, N * m->NH);
    take(arena, m->reduce_scratch, reduce_scratch_floats(N, C, F));
    layout_acts(m, arena, &m->acts);
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward and backward

// One layer: x (N, C) -> out (N, C).
static void layer_forward(GPT *m, size_t l, LayerActs *a, floatX *out, const floatX *x, size_t B, size_t T) {
    size_t N = B * T, C = m->config.C, A = m->A, F = m->F;
    floatX **w = m->w[l];
    cudaStream_t s = m->stream;
    layernorm_forward(a->ln1, a->ln1_mean, a->ln1_rstd, x, w[LN1W], w[LN1B], N, C, s);
    matmul_forward(&m->matmul, a->qkv, a->ln1, w[QKVW], w[QKVB], N, C, 3 * A);
    attention_forward(a->atty, a->lse, a->qkv, B, T, A, m->NH, s, drop(m, l));
    matmul_forward(&m->matmul, m->proj, a->atty, w[PROJW], NULL, N, A, C);
    const floatX *b = dropout_forward(m, RANDOM_DROPOUT_ATTENTION, l, m->proj, w[PROJB], N);
    layernorm_residual_forward(a->residual2, a->ln2, a->ln2_mean, a->ln2_rstd, x, m->proj, b, w[LN2W],
                               w[LN2B], N, C, s);
    matmul_forward(&m->matmul, a->fch, a->ln2, w[FCW], w[FCB], N, C, F);
    gelu_forward(a->fch_gelu, a->fch, N * F, s);
    if (!out) return;  // recomputation: backward needs nothing of what follows
    matmul_forward(&m->matmul, m->proj, a->fch_gelu, w[FCPROJW], NULL, N, F, C);
    b = dropout_forward(m, RANDOM_DROPOUT_MLP, l, m->proj, w[FCPROJB], N);
    residual_forward(out, a->residual2, m->proj, b, N, C, s);
}

// One layer: dresidual (N, C) is the gradient of its output and becomes that of its input x. Weight gradients are
// written by the first micro-batch and added to by the others (add).
static void layer_backward(GPT *m, size_t l, LayerActs *a, const floatX *x, bool add) {
    size_t B = m->B, T = m->T, N = B * T, C = m->config.C, A = m->A, F = m->F;
    floatX **w = m->w[l], *dresidual = m->dresidual;
    float **dw = m->dw[l], *scratch = m->reduce_scratch;
    cudaStream_t s = m->stream;
    if (m->opt.recompute == RECOMPUTE_LAYER) layer_forward(m, l, a, NULL, x, B, T);
    if (m->opt.recompute == RECOMPUTE_GELU) gelu_forward(a->fch_gelu, a->fch, N * F, s);
    // the MLP
    const floatX *dout = dropout_backward(m, RANDOM_DROPOUT_MLP, l, dresidual, m->proj, N);
    matmul_backward_input(&m->matmul, m->dfch, dout, w[FCPROJW], N, F, C);
    matmul_backward_weight(&m->matmul, dw[FCPROJW], a->fch_gelu, dout, N, F, C, add);
    if (bias_apart(m)) bias_backward(dw[FCPROJB], dout, scratch, N, C, add, s);
    gelu_bias_backward(m->dfch, dw[FCB], scratch, m->dfch, a->fch, N, F, add, s);
    matmul_backward_input(&m->matmul, m->dnorm, m->dfch, w[FCW], N, C, F);
    matmul_backward_weight(&m->matmul, dw[FCW], a->ln2, m->dfch, N, C, F, add);
    layernorm_bias_backward(dresidual, dw[LN2W], dw[LN2B], bias_with(m, dw[FCPROJB]), scratch, dresidual,
                            m->dnorm, a->residual2, w[LN2W], a->ln2_mean, a->ln2_rstd, N, C, add, s);
    // the attention
    dout = dropout_backward(m, RANDOM_DROPOUT_ATTENTION, l, dresidual, m->proj, N);
    matmul_backward_input(&m->matmul, m->dnorm, dout, w[PROJW], N, A, C);
    matmul_backward_weight(&m->matmul, dw[PROJW], a->atty, dout, N, A, C, add);
    if (bias_apart(m)) bias_backward(dw[PROJB], dout, scratch, N, C, add, s);
    attention_backward(m->dqkv, m->dattention, m->dnorm, a->atty, a->lse, a->qkv, B, T, A, m->NH, s, drop(m, l));
    matmul_backward_input(&m->matmul, m->dnorm, m->dqkv, w[QKVW], N, C, 3 * A);
    matmul_backward_weight(&m->matmul, dw[QKVW], a->ln1, m->dqkv, N, C, 3 * A, add);
    bias_backward(dw[QKVB], m->dqkv, scratch, N, 3 * A, add, s);
    layernorm_bias_backward(dresidual, dw[LN1W], dw[LN1B], bias_with(m, dw[PROJB]), scratch, dresidual,
                            m->dnorm, x, w[LN1W], a->ln1_mean, a->ln1_rstd, N, C, add, s);
}

// Tokens (B, T) -> lnf (N, C).
static void forward(GPT *m, Acts *acts, const int *inputs, size_t B, size_t T, int micro) {
    size_t N = B * T, C = m->config.C, L = m->config.L;
    floatX **w = m->w[0];
    Span span(m, m->stream, TRACK_COMPUTE, "forward", micro);
    encoder_forward(acts->residual[0], inputs, w[WTE], w[WPE], B, T, C, m->V0, m->Vl, m->stream);
    dropout_forward(m, RANDOM_DROPOUT_EMBEDDING, 0, acts->residual[0], NULL, N);
    for (size_t l = 0; l < L; l++) {
        layer_forward(m, l, &acts->layers[l], acts->residual[l + 1], acts->residual[l], B, T);
    }
    layernorm_forward(acts->lnf, acts->lnf_mean, acts->lnf_rstd, acts->residual[L], w[LNFW], w[LNFB], N, C, m->stream);
}

// lnf (N, C) -> the micro-batch's sum of losses; logits become the gradient of the step's mean loss if wanted.
static void loss(GPT *m, Acts *acts, const int *targets, int micro, bool want_gradient) {
    size_t N = m->B * m->T, C = m->config.C, V = m->config.V;
    Span span(m, m->stream, TRACK_COMPUTE, "loss", micro);
    float *sum = m->row_sums, *target = m->row_sums + N, *losses = m->losses + micro * 2 * N;
    head_forward(&m->matmul, m->logits, acts->lnf, m->w[0][WTE], N, C, m->Vl);
    classifier_stats(m->row_max, sum, target, m->logits, targets, N, V, m->Vl, m->V0, m->stream);
    classifier_gradient(losses, m->logits, m->row_max, sum, target, targets, m->dloss, N, V, m->Vl, m->V0,
                        want_gradient, m->stream);
    loss_sum(&m->loss_sums[micro], losses, N, m->stream);
}

// After loss(): gradients of all weights.
static void backward(GPT *m, Acts *acts, const int *inputs, int micro) {
    size_t B = m->B, T = m->T, N = B * T, C = m->config.C, L = m->config.L;
    floatX **w = m->w[0];
    float **dw = m->dw[0];
    bool add = micro > 0;
    Span span(m, m->stream, TRACK_COMPUTE, "backward", micro);
    head_backward_input(&m->matmul, m->dnorm, m->logits, w[WTE], N, C, m->Vl);
    head_backward_weight(&m->matmul, dw[WTE], acts->lnf, m->logits, N, C, m->Vl, add);
    layernorm_backward(m->dresidual, dw[LNFW], dw[LNFB], m->reduce_scratch, NULL, m->dnorm, acts->residual[L],
                       w[LNFW], acts->lnf_mean, acts->lnf_rstd, N, C, add, m->stream);
    for (size_t l = L; l-- > 0;) layer_backward(m, l, &acts->layers[l], acts->residual[l], add);
    dropout_backward(m, RANDOM_DROPOUT_EMBEDDING, 0, m->dresidual, m->dresidual, N);
    encoder_backward(dw[WTE], dw[WPE], m->dresidual, inputs, B, T, C, m->config.maxT, m->V0, m->Vl, add, m->stream);
}

// All micro-batches of the global batch: with backward to train, without to validate.
static void run_batch(GPT *m, bool training) {
    for (size_t micro = 0; micro < m->micros; micro++) {
        const int *inputs = m->inputs + micro * m->B * m->T, *targets = m->targets + micro * m->B * m->T;
        dropout_at(m, micro);
        forward(m, &m->acts, inputs, m->B, m->T, micro);
        loss(m, &m->acts, targets, micro, training);
        if (training) backward(m, &m->acts, inputs, micro);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The run

// Forward, backward and update over the next global batch.
static void train_step(GPT *m) {
    StepReport report = trainer_begin_step(m);
    run_batch(m, true);
    trainer_norm(m, &report);
    trainer_adamw(m, &report);
    trainer_end_step(m, &report);
}

// Reports the loss over the first batches of the validation data, or over the rows of --eval.
static void validate(GPT *m) {
    Validation v = validation_begin(m);
    while (validation_goes_on(m, &v)) run_batch(m, false);
}

// The logits (Vp) behind the last of the T tokens in inputs.
static const floatX *next_logits(GPT *m, size_t T) {
    forward(m, &m->acts, m->inputs, 1, sample_padded(m, T), -1);
    head_forward(&m->matmul, m->logits, m->acts.lnf + (T - 1) * m->config.C, m->w[0][WTE], 1, m->config.C, m->Vl);
    return m->logits;
}

// Prints the prompt and its continuation, one forward pass for each new token.
static void sample(GPT *m) {
    Sample s = sample_begin(m);
    while (sample_goes_on(m, &s)) sample_append(m, &s, next_logits(m, s.T));
}

int main(int argc, char **argv) {
    static GPT gpt, *m = &gpt;
    trainer_open(m, argc, argv, 0);  // bad input ends here
    m->table = table_make_whole(&m->config);
    layout(m);                       // counts bytes
    trainer_allocate(m);
    layout(m);                       // sets pointers
    job_connect(&m->job);
    trainer_start(m);

    for (;;) {  // what is due after the steps so far, then one more
        if (validation_due(m)) validate(m);
        if (save_due(m)) trainer_save(m);
        if (sample_due(m)) sample(m);
        if (is_last_step(m)) break;
        train_step(m);
    }
    return trainer_close(m);
}
