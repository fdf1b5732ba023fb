// train_llama.cu: train_gpt_3d.cu with the blocks of Llama (Touvron et al. 2023), Qwen2 and Nemotron-4.
// parent: train_gpt_3d.cu
//
// RMSNorm instead of layernorm (Nemotron: a layernorm whose gain is 1 + w). No position embedding: RoPE turns q and k.
// Grouped-query attention: KV key/value heads for NH query heads. The MLP is down(silu(gate x) * up x) (Nemotron:
// down(relu(up x)^2)). No biases (Qwen2: of q, k and v), no dropout. The head is a matrix of its own or the embedding.
//
// The d replicas share the global batch. A bucket of gradients (wte, each layer, ln_f and the head) is summed over them
// by a reduce-scatter. ZeRO-1: each data rank then owns 1/d of every bucket, whatever tensors that cuts, updates it,
// and the weights are gathered again while the next forward runs.
//
// The layers are dealt to p stages in v chunks each: global chunk c*p + s is chunk c of stage s. A stage runs the list
// of steps that llmc/pipeline.h gives it; activations go up and gradients down over links.
//
// Each layer is shared by t ranks. Weights are [out, in]. q, k, v, gate and up are split by rows, each by itself: a
// rank has K = KV*HS/t channels of k and v, and F gates beside the F channels that they multiply. o and down are split
// by columns, embedding and head by rows of the vocabulary.
// Operators f and g stand where the paper draws them. Under sequence parallelism layernorms and residuals are cut by
// rows: Nl = N/t.
//
// Letters: B micro-batch (sequences), T sequence length, N = B*T tokens, C channels, L layers, NH heads, V vocabulary,
// Vp the same padded to 128. A rank has Nl rows of the residual stream, A channels of heads, F hidden units, Vl of Vp.
// A shape stands behind every pointer. w[QKVW] is a weight of a layer, dw[QKVW] its gradient; k's and v's follow q's
// without a gap, up's follows gate's (llmc/llama.h). G is 2 with a gate and 1 without; S = A + 2K; Vl = Vp/t.

// Trainer: everything but the mathematics: options, memory, data, optimizer, checkpoints, log, timeline
#include "llmc/trainer/ranks.cuh"  // with trainer.cuh
#include "llmc/kernels/attention.cuh"
#include "llmc/kernels/classifier.cuh"
#include "llmc/kernels/encoder.cuh"
#include "llmc/kernels/layernorm.cuh"
#include "llmc/kernels/rope.cuh"
#include "llmc/kernels/swiglu.cuh"
#include "llmc/host/tokenizer_kinds.h"
#include "llmc/llama.h"
#include "llmc/pipeline.h"

// ---------------------------------------------------------------------------------------------------------------------
// The model and its memory

// Activations of one layer: its forward pass keeps them for its backward pass.
struct LayerActs {
    Layernorm ln1;                 // (Nl, C), with mean and rstd (Nl)
    floatX *qkv;                   // (N, S), q and k turned by RoPE
    float *lse;                    // (B, NH, T) of attention: log-sum-exp of the scores
    floatX *atty;                  // (N, A)
    floatX *residual2;             // (Nl, C) residual stream between the two halves
    Layernorm ln2;                 // (Nl, C)
    floatX *fch, *fch_act;         // (N, G F) gate|up, or up alone; (N, F) of the activation
};

// Activations of one micro-batch, kept from its forward to its backward pass.
struct Acts {
    LayerActs *layers;             // [L]
    floatX **residual;             // [L + 1] of (Nl, C): input of layer l; the last is the input of ln_f
    Layernorm lnf;                 // (Nl, C)
};

// One end of a link: a link carries activations up or gradients down between two stages. See llmc/pipeline.h.
struct LinkEnd {
    ncclComm_t comm;               // of two ranks, 0 sends to 1; NULL: no such link
    cudaStream_t stream;
    floatX *buffer[PIPELINE_BUFFERS];      // (N * C / t): with tensor ranks each carries its part of the message
    cudaEvent_t moved[PIPELINE_BUFFERS];   // the message in the buffer has arrived, or has been sent
    cudaEvent_t ready[PIPELINE_BUFFERS];   // the compute stream has emptied the buffer, or has filled it
    size_t count;                  // messages so far; number k uses buffer k % PIPELINE_BUFFERS
};

struct GPT : Trainer {
    ncclComm_t tensor;             // the t ranks that share each layer
    ncclComm_t embedding;          // first and last stage, which both hold wte; NULL between them and with one stage
    LinkEnd receive[2], send[2];   // of activations and of gradients: indexed by StepKind
    PipelinePlan plan;             // this stage's chunks of layers, and its steps with their slots
    ncclComm_t data;               // the d ranks that hold the same part of the model
    cudaStream_t data_stream;
    cudaEvent_t bucket_done, reduced_all;  // gradients of a bucket are complete; all buckets are reduced
    cudaEvent_t *gathered_bucket;  // [buckets] its weights are up to date on every data rank

    Llama llama;                   // what GPTConfig lacks
    LlamaOptions own;
    size_t KV, S, G, HS;           // this rank's key/value heads, channels of q|k|v; 2 with a gate; channels of a head
    int head;                      // the tensor that is the head: WTE or HEADW
    float *angles;                 // (T, HS/2, 2) at most: RoPE's cosines and sines

    cudaStream_t comm;             // of the collectives that overlap compute
    cudaEvent_t computed, reduced_ready, gathered_ready;

    Acts *slots;                   // [plan.slots] micro-batches in flight: the schedule says how many
    floatX *logits;                // (N, Vl), then their gradient
    float *row_max, *row_sums;     // (N) and (2, N): maximum, sum of exponentials and target logit of each token
    float *row_max_local;          // (N) of this rank's part of the vocabulary
    floatX *last_logits;           // (Vp) of one token, gathered to sample from
    floatX *proj;                  // (N, C) output of a projection; in backward the masked gradient with dropout
    floatX *reduced;               // (Nl, C) the same, summed over the tensor ranks: proj itself with Nl = N
    floatX *dresidual;             // (Nl, C) gradient of the residual stream
    floatX *dnorm;                 // (N, C) gradient of a layernorm's output, and (N, A) of atty
    floatX *dreduced;              // (Nl, C) the same, summed over the tensor ranks: dnorm itself with Nl = N
    floatX *gathered, *dgathered;  // (N, C) under sequence parallelism: outputs of f, and of g's backward
    floatX *dqkv;                  // (N, S)
    floatX *dfch, *dact;           // (N, G F), (N, F)
    float *dattention;             // (B, NH, T) scratch
    float *reduce_scratch;         // for the two-stage column sums
};

// Makes this data rank the owner of 1/d of every bucket: of the reduced gradients, and with ZeRO of the optimizer.
static void own_buckets(GPT *m, State *state) {
    for (size_t b = 0; b < bucket_count(m); b++) {
        size_t lo = m->table.buckets[b], part = (m->table.buckets[b + 1] - lo) / m->grid.d;
        state_own(state, lo + m->grid.d_rank * part, part);
    }
}

// Sets this rank's sizes, which GPT-2 does not have.
static void set_sizes(GPT *m, size_t t) {
    m->HS = m->A / m->NH, m->KV = m->llama.KV / t, m->S = m->A + 2 * m->KV * m->HS;
    m->G = m->llama.type == NEMOTRON ? 1 : 2, m->head = m->llama.tied ? (int)WTE : (int)HEADW;
}

// Takes this rank's part of every layer and of the vocabulary.
static void shard(GPT *m) {
    Error err;
    PipelineLists lists;
    size_t t = m->grid.t;
    job_agree(&m->job, pipeline_lists(&lists, (Schedule)m->opt.schedule, m->opt.schedule_file, m->grid.p, m->micros,
                                      m->opt.chunks, &err), &err);
    m->plan = pipeline_plan(&lists, m->config.L, m->opt.layers_per_stage, m->grid.p_rank);
    trainer_sizes(m, t), m->V0 = m->grid.t_rank * m->Vl;
    if (m->opt.sequence_parallel) m->sp = t;
    set_sizes(m, t);
    Shard part = shard_whole(&m->config);
    part.t = t, part.t_rank = m->grid.t_rank;
    part.embedding = m->grid.p_rank == 0, part.head = m->grid.p_rank == m->grid.p - 1;
    part.n_layers = m->plan.layer_count, part.layers = m->plan.layers;
    part.bucket_align = TENSOR_ALIGN * m->grid.d;
    trainer_shard(m, part);
    own_buckets(m, &m->part);
    if (m->opt.zero) own_buckets(m, &m->state);
}

// Takes memory for the activations of one micro-batch. With recomputation the layers share those of the first one.
static void layout_acts(GPT *m, Arena *arena, Acts *acts) {
    size_t N = m->B * m->T, Nl = N / m->sp, C = m->config.C, A = m->A, F = m->F, L = m->plan.most_layers;
    host_array(acts->layers, L), host_array(acts->residual, L + 1);
    for (size_t l = 0; l <= L; l++) take(arena, acts->residual[l], Nl * C);
    for (size_t l = 0; l < L; l++) {
        LayerActs *a = &acts->layers[l], *first = &m->slots[0].layers[0];
        int again = a == first ? RECOMPUTE_NONE : m->opt.recompute;  // what backward computes again
        *a = *first;
        if (again < RECOMPUTE_LAYER) take(arena, a->lse, N * m->NH), take(arena, a->atty, N * A);
        if (again < RECOMPUTE_GELU) take(arena, a->fch_act, N * F);
        if (again >= RECOMPUTE_REST) continue;
        take_layernorm(arena, &a->ln1, Nl, C), take_layernorm(arena, &a->ln2, Nl, C);
        take(arena, a->qkv, N * m->S), take(arena, a->residual2, Nl * C), take(arena, a->fch, N * m->G * F);
    }
    if (m->table.shard.head) take_layernorm(arena, &acts->lnf, Nl, C);
}

// Takes memory for every buffer: called once to count bytes, and once to set pointers.
static void layout(GPT *m) {
    size_t N = m->B * m->T, Nl = N / m->sp, C = m->config.C, F = m->F, S = m->S;
    Arena *arena = trainer_layout(m);
    if (m->table.shard.head) take(arena, m->logits, N * m->Vl);
    take(arena, m->row_max, N), take(arena, m->row_sums, 2 * N);
    take(arena, m->proj, N * C), take(arena, m->dresidual, Nl * C), take(arena, m->dnorm, N * C);
    m->reduced = m->proj, m->dreduced = m->dnorm;
    take(arena, m->row_max_local, N), take(arena, m->last_logits, m->config.Vp);
    if (m->sp > 1) {
        take(arena, m->reduced, Nl * C), take(arena, m->dreduced, Nl * C);
        take(arena, m->gathered, N * C), take(arena, m->dgathered, N * C);
    }
    take(arena, m->dqkv, N * S), take(arena, m->dfch, N * m->G * F), take(arena, m->dattention, N * m->NH);
    take(arena, m->dact, N * F), take(arena, m->angles, m->T * m->HS);
    take(arena, m->reduce_scratch, reduce_scratch_floats(N, C, S));
    size_t message = m->grid.p > 1 ? N * C / m->grid.t : 0;
    for (int b = 0; b < PIPELINE_BUFFERS; b++) {
        for (LinkEnd *ends : {m->receive, m->send})
            take(arena, ends[STEP_FORWARD].buffer[b], message), take(arena, ends[STEP_BACKWARD].buffer[b], message);
    }
    host_array(m->slots, m->plan.slots);
    for (size_t i = 0; i < m->plan.slots; i++) layout_acts(m, arena, &m->slots[i]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Operators f and g

// Lets the compute stream wait for an event, if it was ever recorded. The span shows exposed communication.
static void wait_for(GPT *m, cudaEvent_t event, const char *name) {
    Span span(m, m->stream, name);
    CUDA_CHECK(cudaStreamWaitEvent(m->stream, event, 0));
}

// Sums partial (N, C) over the tensor ranks into out (Nl, C): all of it, or under sequence parallelism a rank's rows.
static void tensor_sum(GPT *m, floatX *out, const floatX *partial, size_t N, cudaStream_t s) {
    size_t count = N / m->sp * m->config.C;
    Span span(m, s, m->sp > 1 ? "reduce-scatter" : "all-reduce");
    if (m->sp > 1) NCCL_CHECK(ncclReduceScatter(partial, out, count, NCCL_FLOATX, ncclSum, m->tensor, s));
    else NCCL_CHECK(ncclAllReduce(partial, out, count, NCCL_FLOATX, ncclSum, m->tensor, s));
}

// Under sequence parallelism gathers the rows of all tensor ranks, x (Nl, C) -> out (N, C), and returns out; else x.
static const floatX *tensor_gather(GPT *m, floatX *out, const floatX *x, size_t N, cudaStream_t s) {
    if (m->sp == 1) return x;
    Span span(m, s, "all-gather");
    NCCL_CHECK(ncclAllGather(x, out, N / m->sp * m->config.C, NCCL_FLOATX, m->tensor, s));
    return out;
}

// Operator f of the paper: identity (a gather) in forward, the sum in backward. The sum of dnorm into dreduced, and the
// gather of f's output again, which was not kept, run on a stream of their own and overlap compute.
static const floatX *f_forward(GPT *m, const floatX *x, size_t N) {
    return tensor_gather(m, m->gathered, x, N, m->stream);
}

static const floatX *f_again(GPT *m, const floatX *x) {
    if (m->sp == 1) return x;
    CUDA_CHECK(cudaEventRecord(m->computed, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(m->comm, m->computed, 0));
    tensor_gather(m, m->gathered, x, m->B * m->T, m->comm);
    CUDA_CHECK(cudaEventRecord(m->gathered_ready, m->comm));
    return m->gathered;
}

// Starts the sum. Weight gradients follow on the compute stream, which waits for f_again here.
static void f_backward_begin(GPT *m) {
    if (m->grid.t == 1) return;
    CUDA_CHECK(cudaEventRecord(m->computed, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(m->comm, m->computed, 0));
    tensor_sum(m, m->dreduced, m->dnorm, m->B * m->T, m->comm);
    CUDA_CHECK(cudaEventRecord(m->reduced_ready, m->comm));
    if (m->sp > 1) wait_for(m, m->gathered_ready, "wait tensor");
}

static void f_backward_end(GPT *m) {
    if (m->grid.t > 1) wait_for(m, m->reduced_ready, "wait tensor");
}

// Operator g: the sum in forward, identity (a gather) in backward.
static void g_forward(GPT *m, floatX *out, const floatX *partial, size_t N) {
    if (m->grid.t > 1) tensor_sum(m, out, partial, N, m->stream);
}

static const floatX *g_backward(GPT *m, const floatX *dout) {
    return tensor_gather(m, m->dgathered, dout, m->B * m->T, m->stream);
}

// Under sequence parallelism a rank's layernorm gradients cover its own rows: sums those in elements [lo, hi).
static void reduce_layernorms(GPT *m, size_t lo, size_t hi) {
    if (m->sp == 1) return;
    NCCL_CHECK(ncclGroupStart());
    for (size_t i = 0; i < m->table.count; i++) {
        const Tensor *x = &m->table.tensors[i];
        if (!(x->spec->flags & TENSOR_NORM) || x->offset < lo || x->offset >= hi) continue;
        float *dx = m->state.grads + x->offset;
        NCCL_CHECK(ncclAllReduce(dx, dx, x->size, ncclFloat, ncclSum, m->tensor, m->stream));
    }
    NCCL_CHECK(ncclGroupEnd());
}

// ---------------------------------------------------------------------------------------------------------------------
// Links between pipeline stages

// Enqueues the receipt of x (Nl, C) of N tokens from the neighbour: activations or gradients. Of t tensor ranks each
// gets 1/t from its counterpart and all gather (the scatter/gather optimisation); under sequence parallelism x is 1/t.
static void link_receive(GPT *m, StepKind kind, floatX *x, size_t N, int micro, int chunk) {
    LinkEnd *end = &m->receive[kind];
    size_t b = end->count++ % PIPELINE_BUFFERS, count = N * m->config.C / m->grid.t;
    CUDA_CHECK(cudaStreamWaitEvent(end->stream, end->ready[b], 0));
    Span span(m, end->stream, "recv", micro, chunk);
    NCCL_CHECK(ncclRecv(end->buffer[b], count, NCCL_FLOATX, 0, end->comm, end->stream));
    CUDA_CHECK(cudaEventRecord(end->moved[b], end->stream));
    wait_for(m, end->moved[b], "wait pipeline");
    if (m->sp > 1 || m->grid.t == 1) trainer_copy(m, x, end->buffer[b], count);
    else NCCL_CHECK(ncclAllGather(end->buffer[b], x, count, NCCL_FLOATX, m->tensor, m->stream));
    CUDA_CHECK(cudaEventRecord(end->ready[b], m->stream));
}

// Enqueues the sending of x to the neighbour; later work may overwrite x.
static void link_send(GPT *m, StepKind kind, const floatX *x, size_t N, int micro, int chunk) {
    LinkEnd *end = &m->send[kind];
    size_t b = end->count++ % PIPELINE_BUFFERS, count = N * m->config.C / m->grid.t;
    const floatX *mine = m->sp > 1 ? x : x + m->grid.t_rank * count;
    wait_for(m, end->moved[b], "wait pipeline");
    trainer_copy(m, end->buffer[b], mine, count);
    CUDA_CHECK(cudaEventRecord(end->ready[b], m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(end->stream, end->ready[b], 0));
    Span span(m, end->stream, "send", micro, chunk);
    NCCL_CHECK(ncclSend(end->buffer[b], count, NCCL_FLOATX, 1, end->comm, end->stream));
    CUDA_CHECK(cudaEventRecord(end->moved[b], end->stream));
}

// The chunk that starts from tokens, and the one that ends in the loss.
static bool is_first(const GPT *m, size_t chunk) { return m->table.shard.embedding && chunk == 0; }
static bool is_last(const GPT *m, size_t chunk) { return m->table.shard.head && chunk == m->plan.chunks - 1; }

// ---------------------------------------------------------------------------------------------------------------------
// Buckets: gradients are summed and weights are gathered over the data ranks

// Sums a bucket of gradients over the data ranks, on a stream of its own beside the backward pass; each rank ends with
// its part, and without ZeRO all of them with all parts.
static void reduce_bucket(GPT *m, size_t bucket) {
    size_t lo = m->table.buckets[bucket], hi = m->table.buckets[bucket + 1], part = (hi - lo) / m->grid.d;
    float *grads = m->state.grads + lo, *mine = grads + m->grid.d_rank * part;
    reduce_layernorms(m, lo, hi);
    if (m->grid.d == 1 || part == 0) return;
    CUDA_CHECK(cudaEventRecord(m->bucket_done, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(m->data_stream, m->bucket_done, 0));
    Span span(m, m->data_stream, "reduce-scatter");
    NCCL_CHECK(ncclReduceScatter(grads, mine, part, ncclFloat, ncclSum, m->data, m->data_stream));
    if (!m->opt.zero) NCCL_CHECK(ncclAllGather(mine, grads, part, ncclFloat, m->data, m->data_stream));
}

// Gathers the updated weights of all buckets, in the order in which forward needs them.
static void gather_weights(GPT *m) {
    if (m->grid.d == 1 || !m->opt.zero) return;
    CUDA_CHECK(cudaEventRecord(m->bucket_done, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(m->data_stream, m->bucket_done, 0));
    for (size_t b = 0; b < bucket_count(m); b++) {
        size_t lo = m->table.buckets[b], part = (m->table.buckets[b + 1] - lo) / m->grid.d;
        if (part == 0) continue;
        floatX *params = m->state.params + lo, *mine = params + m->grid.d_rank * part;
        Span span(m, m->data_stream, "all-gather");
        NCCL_CHECK(ncclAllGather(mine, params, part, NCCL_FLOATX, m->data, m->data_stream));
        CUDA_CHECK(cudaEventRecord(m->gathered_bucket[b], m->data_stream));
        if (!m->opt.overlap) CUDA_CHECK(cudaStreamWaitEvent(m->stream, m->gathered_bucket[b], 0));
    }
}

// Whether a bucket of gradients is complete once this micro-batch's backward is through, and its sum may overlap.
static bool reduce_now(const GPT *m, int micro) { return m->opt.overlap && (size_t)micro + 1 == m->micros; }

// Waits on the device until a bucket's weights have been gathered: called before they are read.
static void use_bucket(GPT *m, size_t bucket) {
    if (m->grid.d > 1 && m->opt.zero) wait_for(m, m->gathered_bucket[bucket], "wait data");
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward and backward

// A norm of Nl rows, of residual2 = x + branch first if there is a branch.
static void norm_forward(GPT *m, Layernorm ln, floatX *residual, const floatX *x, const floatX *branch, floatX **w,
                         int weight, size_t Nl) {
    floatX *gain = w[weight], *bias = w[weight + 1];
    size_t C = m->config.C;
    bool rms = m->llama.type != NEMOTRON;
    auto alone = rms ? layernorm_forward<NORM_RMS> : layernorm_forward<NORM_1P>;
    auto behind = rms ? layernorm_residual_forward<NORM_RMS> : layernorm_residual_forward<NORM_1P>;
    float eps = (float)m->llama.epsilon;
    if (branch) behind(residual, ln, x, branch, NULL, gain, bias, Nl, C, m->stream, Dropout(), eps);
    else alone(ln, x, gain, bias, Nl, C, m->stream, eps);
}

// Turns dreduced, the gradient of a norm's output, into that of its input x, which it adds to dresidual if add_to.
static void norm_backward(GPT *m, size_t l, int weight, const floatX *x, Layernorm ln, const floatX *add_to, size_t Nl,
                          bool add) {
    auto backward = m->llama.type == NEMOTRON ? layernorm_backward<NORM_1P> : layernorm_backward<NORM_RMS>;
    backward(m->dresidual, m->dw[l][weight], m->dw[l][weight + 1], m->reduce_scratch, add_to, m->dreduced, x,
             m->w[l][weight], ln, Nl, m->config.C, add, m->stream);
}

// Turns q and k in place; sign -1 turns their gradients back.
static void turn(GPT *m, floatX *qkv, size_t N, size_t T, float sign) {
    size_t D = llama_rotary(&m->llama, m->HS);
    rope(qkv, m->angles, N, T, m->NH + m->KV, m->HS, D, m->S, sign, m->stream);
}

// (N, G F) -> (N, F)
static void activation_forward(GPT *m, floatX *out, const floatX *inp, size_t N) {
    if (m->G == 2) swiglu_forward(out, inp, N, m->F, m->stream);
    else relu2_forward(out, inp, N * m->F, m->stream);
}

static void activation_backward(GPT *m, floatX *dinp, const floatX *dout, const floatX *inp, size_t N) {
    if (m->G == 2) swiglu_backward(dinp, dout, inp, N, m->F, m->stream);
    else relu2_backward(dinp, dout, inp, N * m->F, m->stream);
}

// One layer: x (Nl, C) -> out (Nl, C).
static void layer_forward(GPT *m, size_t l, LayerActs *a, floatX *out, const floatX *x, size_t B, size_t T) {
    size_t N = B * T, Nl = N / m->sp, C = m->config.C, A = m->A, F = m->F;
    floatX **w = m->w[l];
    cudaStream_t s = m->stream;
    norm_forward(m, a->ln1, NULL, x, NULL, w, LN1W, Nl);
    const floatX *ln1 = f_forward(m, a->ln1.out, N);
    linear_forward(&m->matmul, a->qkv, ln1, w[QKVW], w[QKVB], N, C, m->S);
    turn(m, a->qkv, N, T, 1);
    if (out || m->opt.recompute != RECOMPUTE_REST)  // which has kept what attention wrote
        attention_forward(a->atty, a->lse, a->qkv, B, T, A, m->NH, s, Dropout(), m->KV);
    linear_forward(&m->matmul, m->proj, a->atty, w[PROJW], NULL, N, A, C);
    g_forward(m, m->reduced, m->proj, N);
    norm_forward(m, a->ln2, a->residual2, x, m->reduced, w, LN2W, Nl);
    const floatX *ln2 = f_forward(m, a->ln2.out, N);
    linear_forward(&m->matmul, a->fch, ln2, w[FCW], NULL, N, C, m->G * F);
    activation_forward(m, a->fch_act, a->fch, N);
    if (!out) return;  // recomputation: backward reads nothing of what follows
    linear_forward(&m->matmul, m->proj, a->fch_act, w[FCPROJW], NULL, N, F, C);
    g_forward(m, m->reduced, m->proj, N);
    residual_forward<NORM_RMS>(out, a->residual2, m->reduced, NULL, Nl, C, s, Dropout());
}

// One layer: dresidual (Nl, C), the gradient of its output, becomes the gradient of its input x. The first micro-batch
// writes weight gradients and the others add to them (add).
static void layer_backward(GPT *m, size_t l, LayerActs *a, const floatX *x, bool add) {
    size_t B = m->B, T = m->T, N = B * T, Nl = N / m->sp, C = m->config.C, A = m->A, F = m->F, S = m->S;
    floatX **w = m->w[l], *dresidual = m->dresidual;
    float **dw = m->dw[l], *scratch = m->reduce_scratch;
    cudaStream_t s = m->stream;
    if (m->opt.recompute >= RECOMPUTE_REST) layer_forward(m, l, a, NULL, x, B, T);
    if (m->opt.recompute == RECOMPUTE_GELU) activation_forward(m, a->fch_act, a->fch, N);
    // the MLP
    const floatX *dout = g_backward(m, dresidual);
    const floatX *ln2 = f_again(m, a->ln2.out);
    linear_backward_input(&m->matmul, m->dact, dout, w[FCPROJW], N, F, C);
    linear_backward_weight(&m->matmul, dw[FCPROJW], a->fch_act, dout, N, F, C, add);
    activation_backward(m, m->dfch, m->dact, a->fch, N);
    linear_backward_input(&m->matmul, m->dnorm, m->dfch, w[FCW], N, C, m->G * F);
    f_backward_begin(m);
    linear_backward_weight(&m->matmul, dw[FCW], ln2, m->dfch, N, C, m->G * F, add);
    f_backward_end(m);
    norm_backward(m, l, LN2W, a->residual2, a->ln2, dresidual, Nl, add);
    // the attention
    dout = g_backward(m, dresidual);
    const floatX *ln1 = f_again(m, a->ln1.out);
    linear_backward_input(&m->matmul, m->dnorm, dout, w[PROJW], N, A, C);
    linear_backward_weight(&m->matmul, dw[PROJW], a->atty, dout, N, A, C, add);
    attention_backward(m->dqkv, m->dattention, m->dnorm, a->atty, a->lse, a->qkv, B, T, A, m->NH, s, Dropout(), m->KV);
    turn(m, m->dqkv, N, T, -1);
    linear_backward_input(&m->matmul, m->dnorm, m->dqkv, w[QKVW], N, C, S);
    f_backward_begin(m);
    linear_backward_weight(&m->matmul, dw[QKVW], ln1, m->dqkv, N, C, S, add);
    if (w[QKVB]) bias_backward(dw[QKVB], m->dqkv, scratch, N, S, add, s);
    f_backward_end(m);
    norm_backward(m, l, LN1W, x, a->ln1, dresidual, Nl, add);
}

// One chunk: tokens (B, T) or residual[0] -> lnf (Nl, C) or residual[L].
static void forward(GPT *m, Acts *acts, const int *inputs, size_t B, size_t T, int micro, int chunk) {
    size_t N = B * T, Nl = N / m->sp, C = m->config.C, L = m->plan.count[chunk], first = m->plan.first[chunk];
    floatX **w = m->w[0], *x = acts->residual[0];
    Span span(m, m->stream, "forward", micro, chunk);
    if (is_first(m, chunk)) {
        use_bucket(m, 0);
        floatX *partial = m->sp > 1 ? m->proj : x;
        encoder_forward(partial, inputs, w[WTE], NULL, B, T, C, m->V0, m->Vl, m->stream);
        g_forward(m, x, partial, N);
    }
    for (size_t l = 0; l < L; l++) {
        use_bucket(m, 1 + first + l);
        layer_forward(m, first + l, &acts->layers[l], acts->residual[l + 1], acts->residual[l], B, T);
    }
    if (!is_last(m, chunk)) return;
    use_bucket(m, 0);  // the head may be wte
    use_bucket(m, bucket_count(m) - 1);
    norm_forward(m, acts->lnf, NULL, acts->residual[L], NULL, w, LNFW, Nl);
}

// lnf (Nl, C) -> the sum of the micro-batch's losses; to train, the logits become their gradient, and dresidual (Nl, C)
// that of the last layer's output, both of the step's mean loss. Every rank has the logits of its part of the
// vocabulary; only three numbers a token travel: maximum, sum of exponentials, target logit.
static void loss(GPT *m, Acts *acts, const int *targets, int micro, bool training) {
    size_t N = m->B * m->T, Nl = N / m->sp, C = m->config.C, V = m->config.V, L = m->plan.count[m->plan.chunks - 1];
    floatX **w = m->w[0];
    float **dw = m->dw[0], *sum = m->row_sums, *target = m->row_sums + N, *losses = m->losses + micro * 2 * N;
    bool add = micro > 0;
    Span span(m, m->stream, "loss", micro);
    const floatX *lnf = f_forward(m, acts->lnf.out, N);
    linear_forward(&m->matmul, m->logits, lnf, w[m->head], NULL, N, C, m->Vl);
    classifier_stats(m->row_max_local, sum, target, m->logits, targets, N, V, m->Vl, m->V0, m->stream);
    NCCL_CHECK(ncclAllReduce(m->row_max_local, m->row_max, N, ncclFloat, ncclMax, m->tensor, m->stream));
    classifier_rescale(sum, m->row_max_local, m->row_max, N, m->stream);
    NCCL_CHECK(ncclAllReduce(m->row_sums, m->row_sums, 2 * N, ncclFloat, ncclSum, m->tensor, m->stream));
    classifier_gradient(losses, m->logits, m->row_max, sum, target, targets, m->dloss, N, V, m->Vl, m->V0, training,
                        m->stream);
    loss_sum(&m->loss_sums[micro], losses, N, m->stream);
    if (!training) return;
    linear_backward_input(&m->matmul, m->dnorm, m->logits, w[m->head], N, C, m->Vl);
    f_backward_begin(m);
    linear_backward_weight(&m->matmul, dw[m->head], lnf, m->logits, N, C, m->Vl, add);
    f_backward_end(m);
    norm_backward(m, 0, LNFW, acts->residual[L], acts->lnf, NULL, Nl, add);
    if (reduce_now(m, micro)) reduce_bucket(m, bucket_count(m) - 1);
}

// One chunk: dresidual (Nl, C), which loss() or the next chunk has left -> gradients of its layers and embeddings.
static void backward(GPT *m, Acts *acts, const int *inputs, int micro, int chunk) {
    size_t B = m->B, T = m->T, C = m->config.C, L = m->plan.count[chunk], first = m->plan.first[chunk];
    bool add = micro > 0;
    Span span(m, m->stream, "backward", micro, chunk);
    for (size_t l = L; l-- > 0;) {
        layer_backward(m, first + l, &acts->layers[l], acts->residual[l], add);
        if (reduce_now(m, micro)) reduce_bucket(m, 1 + first + l);
    }
    if (!is_first(m, chunk)) return;
    const floatX *dout = g_backward(m, m->dresidual);
    encoder_backward(m->dw[0][WTE], NULL, dout, inputs, B, T, C, 0, m->V0, m->Vl, add, m->stream);
}

// A forward or backward with its messages. The host only enqueues. The products of a sample have new shapes, which
// load kernels: no message may be pending then (llmc/trainer/ranks.cuh).
static void forward_step(GPT *m, Acts *acts, const int *inputs, size_t B, size_t T, int micro, int chunk) {
    if (!is_first(m, chunk)) link_receive(m, STEP_FORWARD, acts->residual[0], B * T, micro, chunk);
    if (m->sample.running) trainer_synchronize(m);
    forward(m, acts, inputs, B, T, micro, chunk);
    if (!is_last(m, chunk)) link_send(m, STEP_FORWARD, acts->residual[m->plan.count[chunk]], B * T, micro, chunk);
}

static void backward_step(GPT *m, Acts *acts, const int *inputs, int micro, int chunk) {
    if (!is_last(m, chunk)) link_receive(m, STEP_BACKWARD, m->dresidual, m->B * m->T, micro, chunk);
    backward(m, acts, inputs, micro, chunk);
    if (!is_first(m, chunk)) link_send(m, STEP_BACKWARD, m->dresidual, m->B * m->T, micro, chunk);
}

// Runs this stage's list of steps: all of it to train, only the forwards to validate.
static void run_batch(GPT *m, bool training) {
    for (size_t i = 0; i < m->plan.step_count; i++) {
        PipelineStep step = m->plan.steps[i];
        size_t micro = step.micro, at = micro * m->B * m->T;
        Acts *acts = &m->slots[training ? m->plan.slot[i] : 0];
        if (micro >= m->micros) continue;  // the list is that of a full batch, --ramp begins with less
        if (step.kind == STEP_FORWARD) forward_step(m, acts, m->inputs + at, m->B, m->T, micro, step.chunk);
        // The logits are made when their gradient is due: one buffer serves all micro-batches in flight.
        bool loss_now = is_last(m, step.chunk) && step.kind == (training ? STEP_BACKWARD : STEP_FORWARD);
        if (loss_now) loss(m, acts, m->targets + at, micro, training);
        if (step.kind == STEP_BACKWARD && training) backward_step(m, acts, m->inputs + at, micro, step.chunk);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The run

// One step: forward, backward and update over the next global batch.
static void train_step(GPT *m) {
    StepReport report = trainer_begin_step(m);
    // A head that is wte writes its gradient, the encoder adds to it: with one stage nothing is left to be zero.
    if (m->w[0][WTE] && (m->embedding || m->head != WTE)) zero_gradient(m, WTE);
    run_batch(m, true);
    // With overlap that of wte is left, which the encoder's gradient completes.
    for (size_t b = 0; b < (m->opt.overlap ? 1 : bucket_count(m)); b++) reduce_bucket(m, b);
    CUDA_CHECK(cudaEventRecord(m->reduced_all, m->data_stream));
    if (m->grid.d > 1) wait_for(m, m->reduced_all, "wait data");
    sum_gradient(m, WTE, m->embedding);  // of two stages: each saw one use of the tied embedding
    trainer_norm(m, &report);
    trainer_adamw(m, &report);
    gather_weights(m);
    trainer_end_step(m, &report);
}

// Appends one token to the sample: the logits after the last of its T tokens say which.
static void sample_token(GPT *m) {
    size_t C = m->config.C, last = m->sample.T - 1;
    for (size_t c = 0; c < m->plan.chunks; c++)
        forward_step(m, m->slots, m->inputs, 1, m->sample.padded, NO_MICRO, c);
    if (m->table.shard.head) {
        const floatX *lnf = f_forward(m, m->slots[0].lnf.out, m->sample.padded);
        linear_forward(&m->matmul, m->logits, lnf + last * C, m->w[0][m->head], NULL, 1, C, m->Vl);
        NCCL_CHECK(ncclAllGather(m->logits, m->last_logits, m->Vl, NCCL_FLOATX, m->tensor, m->stream));
    }
    sample_append(m, m->last_logits);
}

// Makes one end of a link but for its communicator.
static void link_end_create(GPT *m, LinkEnd *end, const char *track) {
    end->stream = stream_create(m, track, true);
    for (int b = 0; b < PIPELINE_BUFFERS; b++) event_create(&end->moved[b]), event_create(&end->ready[b]);
}

// Makes the links, all ranks in the same order. Each carries one element at once: NCCL connects two ranks at their
// first message, and the host waits for it.
static void connect_links(GPT *m) {
    int p = (int)m->grid.p, stage = (int)m->grid.p_rank, from, to;
    link_end_create(m, &m->receive[STEP_FORWARD], "receive activations");
    link_end_create(m, &m->send[STEP_FORWARD], "send activations");
    link_end_create(m, &m->receive[STEP_BACKWARD], "receive gradients");
    link_end_create(m, &m->send[STEP_BACKWARD], "send gradients");
    for (int link = 0; link < pipeline_link_count(p); link++) {
        if (!pipeline_link_ends(p, (int)m->plan.chunks, link, &from, &to)) continue;
        ncclComm_t comm = job_split_link(&m->job, &m->grid, from, to);
        if (!comm) continue;
        LinkEnd *end = stage == from ? &m->send[link / p] : &m->receive[link / p];
        end->comm = comm;
        if (stage == from) NCCL_CHECK(ncclSend(m->proj, 1, NCCL_FLOATX, 1, comm, m->stream));
        else NCCL_CHECK(ncclRecv(m->proj, 1, NCCL_FLOATX, 0, comm, m->stream));
        CUDA_CHECK(cudaStreamSynchronize(m->stream));
    }
}

// Makes the communicators, with a stream of its own for each that overlaps compute.
// Then two micro-batches load all kernels while no message is pending: the second adds to gradients.
static void connect(GPT *m) {
    m->tensor = job_split_grid(&m->job, &m->grid, 't', "tensor", true);
    m->data = job_split_grid(&m->job, &m->grid, 'd', "data");
    event_create(&m->bucket_done), event_create(&m->reduced_all);
    host_array(m->gathered_bucket, bucket_count(m));
    for (size_t b = 0; b < bucket_count(m); b++) event_create(&m->gathered_bucket[b]);
    m->comm = stream_create(m, "all-reduce", true);
    event_create(&m->computed), event_create(&m->reduced_ready), event_create(&m->gathered_ready);
    connect_links(m);
    m->data_stream = stream_create(m, "data", true);
    if (m->grid.p > 1 && m->llama.tied) m->embedding = job_split_grid(&m->job, &m->grid, 'e', "embedding");
    trainer_warm_up(m);
    if (m->grid.p == 1) return;
    for (int micro = 0; micro < 2; micro++) {
        for (size_t c = 0; c < m->plan.chunks; c++) {
            forward(m, m->slots, m->inputs, m->B, m->T, micro, c);
            if (is_last(m, c)) loss(m, m->slots, m->targets, micro, true);
            backward(m, m->slots, m->inputs, micro, c);
        }
    }
}

// What the options must fulfil beside those of the 3D trainer.
static bool check(Trainer *base, Error *err) {
    GPT *m = (GPT *)base;
    if (m->opt.dropout > 0) return error_set(err, "--dropout: these models have none; leave it out");
    return llama_resolve(&m->llama, &m->own, &m->config, m->opt.init || m->opt.resume, m->grid.t, err);
}

// Makes RoPE's table, of the T positions that a forward pass sees, once the warm-up has left its place.
static void make_angles(GPT *m) {
    size_t D = llama_rotary(&m->llama, m->HS);
    float *table = NULL;
    if (m->opt.simulate) return;  // no data move
    host_array(table, m->T * D);
    llama_rope_table(&m->llama, table, m->T, D);
    CUDA_CHECK(cudaMemcpy(m->angles, table, m->T * D * sizeof(float), cudaMemcpyHostToDevice));
    free(table);
}

int main(int argc, char **argv) {
    static GPT gpt, *m = &gpt;
    FieldTable rows = {LLAMA_ROWS, sizeof LLAMA_ROWS / sizeof LLAMA_ROWS[0], &m->own};
    llama_make(&m->llama);  // it can read a config.json now
    Lesson llama = {rows, check, &m->llama.spec, llama_sizes, tokenizer_open_kind};
    trainer_open(m, argc, argv, OPTIONS_TENSOR | OPTIONS_PIPELINE | OPTIONS_DATA, llama);  // bad input ends here
    shard(m);
    trainer_allocate(m, layout);
    connect(m);
    make_angles(m);
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
