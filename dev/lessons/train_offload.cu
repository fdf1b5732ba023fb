// train_offload.cu: train_gpt.cu with activations that wait for backward on the host.
// parent: train_gpt.cu
//
// The device keeps the activations of two layers, used in turn. As soon as a layer's forward
// is through, they travel to pinned host memory on a stream of their own. This overlaps the
// next layer's forward. They come back during the backward of the layer behind. MEMO (Zhao
// et al. 2024) splits them by tokens. A layer's input and attention's output always travel.
// All other activations travel for the share --offload A of the tokens, and backward
// recomputes the other tokens. With --offload auto it is the share whose copies hide behind
// a layer's forward.
//
// Letters: B micro-batch (sequences), T sequence length, N = B*T tokens, C channels,
// L layers, NH heads, V vocabulary, Vp the same padded to 128. A shape stands behind every
// pointer. Weights are [in, out]: w[QKVW] is one of a layer, dw[QKVW] its gradient
// (llmc/model.h).
//
// The trainer train_gpt_tp.cu shares each layer among ranks, and has letters for a rank's
// part of it. Here a rank has whole layers:
//   A = C channels, in NHl = NH heads.
//   F = 4C hidden units.
//   Vl = Vp tokens of the vocabulary, from V0 = 0 on.
//   Nl = N/sp = N rows of the residual stream, as sp = 1.

// Trainer: everything but the mathematics: options, memory, data, optimizer, checkpoints
#include "llmc/trainer/offload.cuh"
#include "llmc/kernels/attention.cuh"
#include "llmc/kernels/classifier.cuh"
#include "llmc/kernels/encoder.cuh"
#include "llmc/kernels/gelu.cuh"
#include "llmc/kernels/layernorm.cuh"
#include "llmc/kernels/matmul.cuh"

// ----------------------------------------------------------------------------------------
// The model and its memory

// The forward pass of a layer keeps these for its backward pass.
struct LayerActs {
    Layernorm ln1;      // (Nl, C)      with mean and rstd of each row
    floatX *qkv;        // (N, 3A)      queries, keys and values side by side
    float *lse;         // (B, NHl, T)  log-sum-exp of each query's scores
    floatX *atty;       // (N, A)       output of attention
    floatX *residual2;  // (Nl, C)      residual stream between attention and MLP
    Layernorm ln2;      // (Nl, C)
    floatX *fch;        // (N, F)       hidden units before GELU
    floatX *fch_gelu;   // (N, F)       and behind it
};

// A micro-batch keeps these from its forward to its backward pass.
struct Acts {
    LayerActs *layers;  // [L]
    floatX **residual;  // [L + 1] of (Nl, C): the input of each layer, and that of ln_f;
                        // three buffers in turn
    Layernorm lnf;      // (Nl, C)
};

struct GPT : Trainer {
    Offload offload;        // the tokens and layers that travel
    cudaStream_t host_stream;
    cudaEvent_t computed;   // the layer to be copied is written, or its buffers are free
    cudaEvent_t copied[2];  // the buffers of even and of odd layers

    Acts acts;          // of the current micro-batch

    // The loss has the largest buffer, so its gradient takes the place of the logits.
    floatX *logits;     // (N, Vl)      become their own gradient
    float *row_max;     // (N)          the largest logit of a token
    float *row_sums;    // (2, N)       sum of the exponentials; logit of the target

    // One layer is at work at a time, so one set of these serves all.
    floatX *proj;       // (N, C)       output of a projection; gradient behind dropout
    floatX *dresidual;  // (Nl, C)      gradient of the residual stream
    floatX *dnorm;      // (N, C)       gradient of a layernorm's output; (N, A) of atty
    floatX *dqkv;       // (N, 3A)
    floatX *dfch;       // (N, F)
    float *dattention;  // (B, NHl, T)  scratch of attention's backward pass
    float *scratch;     // partial sums over rows, for gradients of biases and layernorms
};

// Takes memory for the activations of one micro-batch. Two layers have activations at a
// time: layer l takes the buffers of layer l - 2.
static void layout_acts(GPT *m, Arena *arena, Acts *acts) {
    size_t N = m->B * m->T, Nl = N / m->sp;
    size_t C = m->config.C, A = m->A, F = m->F;
    size_t L = m->config.L;
    host_array(acts->layers, L);
    host_array(acts->residual, L + 1);

    // Layer l writes its output while the input of layer l - 1 is still on its way.
    for (size_t l = 0; l <= L; l++) {
        if (l < 3)
            take(arena, acts->residual[l], Nl * C);
        else
            acts->residual[l] = acts->residual[l - 3];
    }

    for (size_t l = 0; l < L; l++) {
        LayerActs *a = &acts->layers[l];
        LayerActs *first = &m->acts.layers[0];
        if (l >= 2) {
            *a = acts->layers[l - 2];
            continue;
        }

        take_layernorm(arena, &a->ln1, Nl, C);
        take(arena, a->qkv, N * 3 * A);
        take(arena, a->lse, N * m->NHl);
        take(arena, a->atty, N * A);
        take(arena, a->residual2, Nl * C);
        take_layernorm(arena, &a->ln2, Nl, C);
        take(arena, a->fch, N * F);
        if (m->opt.recompute == RECOMPUTE_GELU && a != first)
            a->fch_gelu = first->fch_gelu;
        else
            take(arena, a->fch_gelu, N * F);
    }
    take_layernorm(arena, &acts->lnf, Nl, C);
}

// Takes memory for every buffer: called once to count bytes, and once to set pointers, so
// that --dry-run prints the bytes that training takes.
static void layout(GPT *m) {
    size_t N = m->B * m->T, Nl = N / m->sp;
    size_t C = m->config.C, A = m->A, F = m->F;
    Arena *arena = trainer_layout(m);

    // the loss
    take(arena, m->logits, N * m->Vl);
    take(arena, m->row_max, N);
    take(arena, m->row_sums, 2 * N);

    // one layer at a time
    take(arena, m->proj, N * C);
    take(arena, m->dresidual, Nl * C);
    take(arena, m->dnorm, N * C);
    take(arena, m->dqkv, N * 3 * A);
    take(arena, m->dfch, N * F);
    take(arena, m->dattention, N * m->NHl);
    take(arena, m->scratch, reduce_scratch_floats(N, C, F));

    // all layers
    layout_acts(m, arena, &m->acts);
}

// ----------------------------------------------------------------------------------------
// To the host and back

// Lists the buffers that a layer's backward reads. Attention looks at all tokens, so its
// output always travels. All else is computed from that and from x, a token at a time.
static void layer_rows(const GPT *m, size_t l, OffloadRow rows[OFFLOAD_ROWS]) {
    const LayerActs *a = &m->acts.layers[l];
    size_t wide = sizeof(floatX), C = m->config.C * wide, A = m->A * wide, F = m->F * wide;
    const OffloadRow list[OFFLOAD_ROWS] = {
        {m->acts.residual[l], C, true},
        {a->atty, A, true},
        {a->lse, m->NHl * sizeof(float), true},
        {a->ln1.out, C},
        {a->ln1.mean, sizeof(float)},
        {a->ln1.rstd, sizeof(float)},
        {a->qkv, 3 * A},
        {a->residual2, C},
        {a->ln2.out, C},
        {a->ln2.mean, sizeof(float)},
        {a->ln2.rstd, sizeof(float)},
        {a->fch, F},
        {a->fch_gelu, m->opt.recompute == RECOMPUTE_GELU ? 0 : F},
    };
    memcpy(rows, list, sizeof list);
}

// Copies a layer to the host or back. The copy begins when the compute stream has done all
// work enqueued so far, and overlaps the work enqueued later.
static void copy_layer(GPT *m, size_t l, cudaMemcpyKind kind) {
    OffloadRow rows[OFFLOAD_ROWS];
    layer_rows(m, l, rows);
    cudaStream_t s = m->host_stream;
    CUDA_CHECK(cudaEventRecord(m->computed, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(s, m->computed, 0));
    bool leaves = kind == cudaMemcpyDeviceToHost;
    Span span(m, s, leaves ? "send activations" : "recv activations", NO_MICRO, (int)l);
    offload_copy(&m->offload, l, rows, kind, s);
    CUDA_CHECK(cudaEventRecord(m->copied[l % 2], s));
}

// Returns a layer's buffers from a token on. Without lse: attention's output is there.
static LayerActs rows_from(const GPT *m, const LayerActs *a, size_t first) {
    size_t C = m->config.C, A = m->A, F = m->F;
    LayerActs rows = *a;
    rows.ln1 = {a->ln1.out + first * C, a->ln1.mean + first, a->ln1.rstd + first};
    rows.qkv += first * 3 * A;
    rows.lse = NULL;
    rows.atty += first * A;
    rows.residual2 += first * C;
    rows.ln2 = {a->ln2.out + first * C, a->ln2.mean + first, a->ln2.rstd + first};
    rows.fch += first * F;
    rows.fch_gelu += first * F;
    return rows;
}

// ----------------------------------------------------------------------------------------
// Forward and backward

// Runs one layer, x (Nl, C) -> out (Nl, C). Attention lets each token look at the tokens
// before it. The MLP looks at each token alone. Both add to the residual stream.
static void layer_forward(GPT *m, size_t l, LayerActs *a, floatX *out, const floatX *x,
                          size_t B, size_t T) {
    size_t N = B * T, Nl = N / m->sp;
    size_t C = m->config.C, A = m->A, F = m->F;
    floatX **w = m->w[l];
    Matmul *mm = &m->matmul;
    cudaStream_t s = m->stream;

    // attention: a token's query meets the keys of all tokens before it, and takes more of
    // the values whose keys are like it
    layernorm_forward(a->ln1, x, w[LN1W], w[LN1B], Nl, C, s);
    matmul_forward(mm, a->qkv, a->ln1.out, w[QKVW], w[QKVB], N, C, 3 * A);
    if (a->lse)
        attention_forward(a->atty, a->lse, a->qkv, B, T, A, m->NHl, s,
                          drop(m, DROPOUT_SCORES, l));
    matmul_forward(mm, m->proj, a->atty, w[PROJW], NULL, N, A, C);

    // Its bias, the sum and the next layernorm are one kernel: the row is read once.
    layernorm_residual_forward(a->residual2, a->ln2, x, m->proj, w[PROJB],
                               w[LN2W], w[LN2B], Nl, C, s, drop(m, DROPOUT_PROJ, l));

    // the MLP: four times as many hidden units as channels (F = 4C on a rank alone)
    matmul_forward(mm, a->fch, a->ln2.out, w[FCW], w[FCB], N, C, F);
    gelu_forward(a->fch_gelu, a->fch, N * F, s);
    if (!out) return;  // Backward computes a layer again up to here: it reads no more.

    matmul_forward(mm, m->proj, a->fch_gelu, w[FCPROJW], NULL, N, F, C);
    residual_forward(out, a->residual2, m->proj, w[FCPROJB], Nl, C, s,
                     drop(m, DROPOUT_FCPROJ, l));
}

// Runs one layer backward. dresidual (Nl, C), the gradient of its output, becomes the
// gradient of its input x. The gradient of a matrix product is two products, one for its
// input and one for its weight. Gradients of weights are sums over the micro-batches: the
// first one writes them, the others add to them (add).
static void layer_backward(GPT *m, size_t l, LayerActs *a, const floatX *x, bool add) {
    size_t B = m->B, T = m->T;
    size_t N = B * T, Nl = N / m->sp;
    size_t C = m->config.C, A = m->A, F = m->F;
    floatX **w = m->w[l];
    float **dw = m->dw[l];
    floatX *dresidual = m->dresidual;
    float *scratch = m->scratch;
    Matmul *mm = &m->matmul;
    cudaStream_t s = m->stream;

    // First recompute the activations that forward did not keep. The tokens that did not
    // travel come from the layer's input and attention's output; or only GELU's output
    // comes from the hidden units.
    size_t moved = m->offload.moved;
    if (l < m->offload.layers && moved < N) {
        LayerActs rest = rows_from(m, a, moved);
        m->dropout.row += moved;
        layer_forward(m, l, &rest, NULL, x + moved * C, 1, N - moved);
        m->dropout.row -= moved;
    }
    if (m->opt.recompute == RECOMPUTE_GELU)
        gelu_forward(a->fch_gelu, a->fch, N * F, s);

    // the MLP: a product's gradient for its input, then for its weight and for its bias
    const floatX *dout = dropout_backward(m->proj, dresidual,
                                          drop(m, DROPOUT_FCPROJ, l), Nl, C, s);
    matmul_backward_input(mm, m->dfch, dout, w[FCPROJW], N, F, C);
    matmul_backward_weight(mm, dw[FCPROJW], a->fch_gelu, dout, N, F, C, add);
    bias_backward(dw[FCPROJB], dout, scratch, N, C, add, s);
    gelu_backward(m->dfch, dw[FCB], scratch, m->dfch, a->fch, N, F, add, s);
    matmul_backward_input(mm, m->dnorm, m->dfch, w[FCW], N, C, F);
    matmul_backward_weight(mm, dw[FCW], a->ln2.out, m->dfch, N, C, F, add);

    // residual2 has gone past the MLP as well as through it: both gradients add up.
    layernorm_backward(dresidual, dw[LN2W], dw[LN2B], scratch, dresidual, m->dnorm,
                       a->residual2, w[LN2W], a->ln2, Nl, C, add, s);

    // attention: its backward pass computes the scores again, which are too many to keep
    dout = dropout_backward(m->proj, dresidual, drop(m, DROPOUT_PROJ, l), Nl, C, s);
    matmul_backward_input(mm, m->dnorm, dout, w[PROJW], N, A, C);
    matmul_backward_weight(mm, dw[PROJW], a->atty, dout, N, A, C, add);
    bias_backward(dw[PROJB], dout, scratch, N, C, add, s);
    attention_backward(m->dqkv, m->dattention, m->dnorm, a->atty, a->lse, a->qkv,
                       B, T, A, m->NHl, s, drop(m, DROPOUT_SCORES, l));
    matmul_backward_input(mm, m->dnorm, m->dqkv, w[QKVW], N, C, 3 * A);
    matmul_backward_weight(mm, dw[QKVW], a->ln1.out, m->dqkv, N, C, 3 * A, add);
    bias_backward(dw[QKVB], m->dqkv, scratch, N, 3 * A, add, s);

    // x has gone past attention, too. dresidual is now the gradient of the layer before.
    layernorm_backward(dresidual, dw[LN1W], dw[LN1B], scratch, dresidual, m->dnorm,
                       x, w[LN1W], a->ln1, Nl, C, add, s);
}

// Runs the layers, tokens (B, T) -> lnf (Nl, C). The residual stream begins with a
// token's row of wte and its position's row of wpe.
static void forward(GPT *m, Acts *acts, const int *inputs, size_t B, size_t T, int micro,
                    bool training = false) {
    size_t N = B * T, Nl = N / m->sp;
    size_t C = m->config.C, L = m->config.L;
    floatX **w = m->w[0];
    floatX *x = acts->residual[0];
    cudaStream_t s = m->stream;

    // This is the only place where a token's position counts.
    encoder_forward(x, inputs, w[WTE], w[WPE], B, T, C, m->V0, m->Vl, s);
    dropout_forward(x, drop(m, DROPOUT_EMBEDDING, 0), Nl, C, s);

    for (size_t l = 0; l < L; l++) {
        // The layer that had these buffers has left.
        if (training && l >= 2)
            wait_for(m, m->copied[l % 2], "wait host");
        Span span(m, s, "forward", micro, (int)l);
        layer_forward(m, l, &acts->layers[l], acts->residual[l + 1], acts->residual[l],
                      B, T);
        if (training && l < m->offload.layers)
            copy_layer(m, l, cudaMemcpyDeviceToHost);
    }

    layernorm_forward(acts->lnf, acts->residual[L], w[LNFW], w[LNFB], Nl, C, s);
}

// Computes the micro-batch's losses from lnf (Nl, C). To train, the logits become their
// own gradient, softmax minus target. The gradient of the last layer's output goes to
// dresidual (Nl, C). Both are gradients of the step's mean loss.
static void loss_and_gradient(GPT *m, Acts *acts, const int *targets, int micro,
                              bool training) {
    size_t N = m->B * m->T, Nl = N / m->sp;
    size_t C = m->config.C, L = m->config.L;
    size_t V = m->config.V, Vl = m->Vl, V0 = m->V0;
    floatX **w = m->w[0];
    float **dw = m->dw[0];
    float *sum = m->row_sums;
    float *target = sum + N;
    float *losses = trainer_losses(m, micro);
    bool add = micro > 0;
    Matmul *mm = &m->matmul;
    cudaStream_t s = m->stream;
    Span span(m, s, "loss", micro);

    // The head is wte once more: [out, in], as the linear_ functions have it. A softmax by
    // its largest logit does not overflow.
    linear_forward(mm, m->logits, acts->lnf.out, w[WTE], NULL, N, C, Vl);
    classifier_stats(m->row_max, sum, target, m->logits, targets, N, V, Vl, V0, s);
    classifier_gradient(losses, m->logits, m->row_max, sum, target, targets,
                        m->dloss, N, V, Vl, V0, training, s);

    // Losses are summed in double and in a fixed order, so that the sum is reproducible.
    loss_sum(&m->loss_sums[micro], losses, N, s);
    if (!training) return;

    // Backward begins: through the head, and through the last layernorm.
    linear_backward_input(mm, m->dnorm, m->logits, w[WTE], N, C, Vl);
    linear_backward_weight(mm, dw[WTE], acts->lnf.out, m->logits, N, C, Vl, add);
    layernorm_backward(m->dresidual, dw[LNFW], dw[LNFB], m->scratch, NULL, m->dnorm,
                       acts->residual[L], w[LNFW], acts->lnf, Nl, C, add, s);
}

// Computes the gradients of all layers and of the embeddings. Takes dresidual (Nl, C) as
// loss_and_gradient has left it. The matrix wte has two uses: the lookup's gradient adds
// to the head's.
static void backward(GPT *m, Acts *acts, const int *inputs, int micro) {
    size_t B = m->B, T = m->T, Nl = B * T / m->sp;
    size_t C = m->config.C, L = m->config.L;
    float **dw = m->dw[0];
    bool add = micro > 0;
    cudaStream_t s = m->stream;

    for (size_t l = L; l-- > 0;) {
        // Layer l + 1 is through, and layer l - 1 comes back in its place.
        if (l > 0 && l <= m->offload.layers)
            copy_layer(m, l - 1, cudaMemcpyHostToDevice);
        if (l < m->offload.layers)
            wait_for(m, m->copied[l % 2], "wait host");
        Span span(m, s, "backward", micro, (int)l);
        layer_backward(m, l, &acts->layers[l], acts->residual[l], add);
    }

    const floatX *dout = dropout_backward(m->dresidual, m->dresidual,
                                          drop(m, DROPOUT_EMBEDDING, 0), Nl, C, s);
    encoder_backward(dw[WTE], dw[WPE], dout, inputs, B, T, C, m->config.maxT, m->V0, m->Vl,
                     add, s);
}

// Runs all micro-batches of the global batch: with backward to train, without to validate.
// A micro-batch is as large as memory allows. The gradients of all are summed.
static void run_batch(GPT *m, bool training) {
    for (size_t micro = 0; micro < m->micros; micro++) {
        size_t at = micro * m->B * m->T;
        dropout_at(m, micro);
        forward(m, &m->acts, m->inputs + at, m->B, m->T, micro, training);
        loss_and_gradient(m, &m->acts, m->targets + at, micro, training);
        if (training)
            backward(m, &m->acts, m->inputs + at, micro);
    }
}

// ----------------------------------------------------------------------------------------
// The run

// Runs one step over the next global batch: forward, backward and update. The norm of all
// gradients together decides if AdamW clips them.
static void train_step(GPT *m) {
    StepReport report = trainer_begin_step(m);
    run_batch(m, true);
    trainer_norm(m, &report);
    trainer_adamw(m, &report);
    trainer_end_step(m, &report);
}

// Appends one token to the sample. Attention looks back only, so the last of its T tokens
// has the logits of the next one, and tokens behind it (padding) do no harm.
static void sample_token(GPT *m) {
    size_t C = m->config.C, last = m->sample.T - 1;
    forward(m, &m->acts, m->inputs, 1, m->sample.padded, NO_MICRO);

    const floatX *lnf = m->acts.lnf.out;
    linear_forward(&m->matmul, m->logits, lnf + last * C, m->w[0][WTE], NULL, 1, C, m->Vl);
    sample_append(m, m->logits);
}

// Checks this lesson's flag, before any data are opened.
static bool check_offload(Trainer *m, Error *err) {
    return offload_check(&((GPT *)m)->offload, m->opt.recompute, err);
}

// Counts device and host memory, and takes both. The last two layers stay on the device, as
// backward begins with them. With --offload auto a layer's forward is timed.
static void allocate(GPT *m) {
    OffloadRow rows[OFFLOAD_ROWS];
    layout(m);
    layer_rows(m, 0, rows);
    m->offload.layers = m->config.L > 2 ? m->config.L - 2 : 0;
    offload_plan(m, &m->offload, rows);
    trainer_allocate(m, layout);

    m->host_stream = stream_create(m, "host", true);
    event_create(&m->computed);
    event_create(&m->copied[0]);
    event_create(&m->copied[1]);
    layer_rows(m, 0, rows);
    if (m->offload.measured) {
        double seconds = offload_seconds(m->stream, [=] {
            layer_forward(m, 0, &m->acts.layers[0], m->acts.residual[1], m->acts.residual[0],
                          m->B, m->T);
        });
        offload_choose(&m->offload, rows, seconds, m->host_stream);
    }
    offload_allocate(m, &m->offload, rows);
}

int main(int argc, char **argv) {
    static GPT gpt, *m = &gpt;
    Lesson lesson = {{OFFLOAD_OPTIONS, OFFLOAD_OPTION_ROWS, &m->offload}, check_offload, NULL,
                     NULL};
    trainer_open(m, argc, argv, lesson);  // Bad input ends here.
    trainer_shard(m, shard_whole(&m->config));
    allocate(m);
    trainer_start(m);

    // Between two steps come validation, a checkpoint and a sample, each when it is due.
    for (;;) {
        while (validation_goes_on(m))
            run_batch(m, false);
        if (save_due(m))
            trainer_save(m);
        while (sample_goes_on(m))
            sample_token(m);
        if (is_last_step(m))
            break;
        train_step(m);
    }
    return trainer_close(m);
}
