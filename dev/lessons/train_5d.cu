// train_5d.cu: train_llama.cu plus context and expert parallelism: five dimensions.
// parent: dev/lessons/train_llama.cu
//
// There are t * d * p ranks. Of the d data ranks, c neighbours share each sequence, as in
// train_context: each has chunks i and 2c-1-i of 2c. Keys and values go round a ring, or an
// all-to-all gives each rank all tokens of 1/c of the heads (llmc/trainer/context_ranks.cuh).
// And e neighbours share out the experts, which a layer has in the place of its MLP, as in
// train_moe. The two cuts are independent. With c = e = 2 the same two ranks share a sequence
// and the experts. With c = 2 and e = 4 the experts serve two sequences.
//
// The hard part of five dimensions is to know which ranks have summands of a gradient.
//
//   tensor                  cut over  its gradient is summed over          optimizer, ZeRO-1
//   q, k, v, o, MLP         t         d                                    1/d each
//   embedding, head         t         d; if tied, then first + last stage  1/d each
//   layernorms              -         t under sequence parallelism; d      1/d each
//   norms of q's, k's heads -         t; d                                 1/d each
//   router                  -         t; d                                 1/d each
//   experts                 e, t      the d/e ranks that hold them         e/d each
//
// Pipeline stages hold layers of their own. So only the tied embedding's sum crosses them.
// The table has no c: ranks of one sequence hold the same weights and have other tokens,
// as any two data ranks do.
//
// The blocks are train_llama's, or have experts as Mixtral (Jiang et al. 2024) and Qwen3-MoE
// do. A router makes a softmax over E experts, and each token meets the k most probable.
// Their results are weighted by these probabilities, or by each one's share of the k. Experts
// stand between f and g as an MLP does. A tensor rank has 1/t of the hidden units of each, so
// it routes all N rows and makes a summand of the results. With --capacity 0 no token is
// dropped: an expert has T places for a rank's T tokens of a sequence.
//
// Letters: B micro-batch (sequences), T tokens of a sequence on this rank, N = B*T, C
// channels, L layers, NH heads, V vocabulary, Vp the same padded to 128. A shape stands behind
// every pointer. A layer's weight w[QKVW] has the gradient dw[QKVW]. The matrices of k and v
// follow q's without a gap, and up's follows gate's (llmc/llama.h). The matrices w[FCW] and
// w[FCPROJW] belong to the first expert that this rank holds (llmc/model_5d.h).
//
// Each of t tensor ranks has:
//   A = NHl HS channels of q, in NHl = NH/t query heads.
//   K = KVl HS channels of k and as many of v, in KVl = KV/t key/value heads.
//   S = A + 2 K channels of q, k and v together.
//   F hidden units, which G = 2 matrices make (1 without a gate).
//   Vl = Vp/t tokens of the vocabulary, from V0 on.
//   Nl = N/sp rows of the residual stream. Under sequence parallelism sp = t, else 1.
//   R = N rows for an MLP.
//
// With experts, for a micro-batch:
//   R = E B slots places that this rank's tokens have in all E experts.
//   El = E/e experts on this rank.
//   They have as many places for the tokens of all e ranks, Re = R/El each.

// Trainer: everything but the mathematics: options, memory, data, optimizer, checkpoints
#include "llmc/trainer/stages.cuh"
#include "llmc/trainer/context_ranks.cuh"
#include "llmc/trainer/expert_ranks.cuh"
#include "llmc/trainer/moe_statistics.cuh"
#include "llmc/kernels/attention.cuh"
#include "llmc/kernels/classifier.cuh"
#include "llmc/kernels/encoder.cuh"
#include "llmc/kernels/head_norm.cuh"
#include "llmc/kernels/layernorm.cuh"
#include "llmc/kernels/moe.cuh"
#include "llmc/kernels/rope.cuh"
#include "llmc/kernels/swiglu.cuh"
#include "llmc/host/documents.h"
#include "llmc/host/tokenizer_kinds.h"
#include "llmc/model_5d.h"

// ----------------------------------------------------------------------------------------
// The model and its memory

// The forward pass of a layer keeps these for its backward pass.
struct LayerActs {
    Layernorm ln1;      // (Nl, C)      with mean and rstd of each row
    floatX *qk;         // (N, S - K)   Qwen3: q and k before the norms of their heads
    floatX *qkv;        // (N, S)       queries, keys and values; q and k turned by RoPE
    float *lse;         // (B, NHl, T)  log-sum-exp of each query's scores
    floatX *atty;       // (N, A)       output of attention
    floatX *whole;      // (B, cT, A/c) Ulysses: of 1/c of the heads, as are qkv and lse then
    floatX *residual2;  // (Nl, C)      residual stream between attention and MLP
    Layernorm ln2;      // (Nl, C)
    Routing routing;    // where the N tokens go, and from where the rows of experts come
    floatX *expert_in;  // (R, C)       the tokens of e ranks that came to this rank's experts
    floatX *fch;        // (R, G F)     gate|up, or up alone
    floatX *fch_act;    // (R, F)       behind the activation
    floatX *expert_out; // (R, C)       results of all experts for this rank's tokens
};

// A micro-batch keeps these from its forward to its backward pass.
struct Acts {
    LayerActs *layers;  // [L]
    floatX **residual;  // [L + 1] of (Nl, C): the input of each layer, and that of ln_f
    Layernorm lnf;      // (Nl, C)
};

// One end of a link. A link carries activations up or gradients down between two stages. It
// has a stream of its own at both ends, so a message that waits holds up neither compute
// nor other messages. Two buffers let a message travel while compute is at the next.
struct LinkEnd {
    ncclComm_t comm;        // of two ranks, 0 sends to 1; NULL: no link, or not connected yet
    cudaStream_t stream;
    floatX *buffer[PIPELINE_BUFFERS];       // (N * C / t)  a tensor rank's part of a message
    cudaEvent_t filled[PIPELINE_BUFFERS];   // the buffer holds a message
    cudaEvent_t emptied[PIPELINE_BUFFERS];  // and can take the next one
    size_t count;           // messages so far; number k is in buffer k % PIPELINE_BUFFERS
};

struct GPT : Trainer {
    MoeLlama model;               // the sizes that GPTConfig lacks
    Llama &llama = model.llama;
    Options5D flags;
    size_t HS;                    // channels of a head
    size_t KVl, K, S, G;          // see Letters
    int head;                     // the tensor that is the head: WTE or HEADW
    float *angles;                // (T, HS/2, 2) at most: RoPE's cosines and sines
    float *angles_alone;          // the same of a sequence that is not cut

    int *first;                   // (micros, c, B, T)  the first key that each query sees
    int *host_first;              // the same, pinned
    double *scores;               // [micros][c] pairs of a query and a key that it sees
    int *whole_first;             // [cT] the first key of each token of a sequence
    int eot;                      // the token that a document begins with, or -1
    ContextKeys keys;             // of the current micro-batch

    // Context parallelism: c of the data ranks share each sequence.
    ContextRanks context;

    // Expert parallelism: e of the data ranks share out the experts.
    Moe moe;                      // E experts (0: an MLP), k of a token, their places
    ExpertRanks experts;
    MoeStatistics statistics;     // for --log

    ncclComm_t tensor;            // the t ranks that share each layer
    cudaStream_t tensor_stream;   // for its collectives that overlap compute
    cudaEvent_t computed;         // the input of such a collective is written
    cudaEvent_t reduced_ready;    // dreduced is written
    cudaEvent_t gathered_ready;   // gathered is written

    ncclComm_t embedding;   // first and last stage, which both hold wte; else NULL
    LinkEnd receive[2];     // of activations and of gradients, by StepKind
    LinkEnd send[2];
    PipelinePlan plan;      // this stage's chunks of layers, and its steps with their slots

    ncclComm_t data;               // the d ranks that hold the same part of the model
    cudaStream_t data_stream;
    cudaEvent_t bucket_done;       // the next bucket to reduce or gather is written
    cudaEvent_t reduced_all;       // all buckets are reduced
    cudaEvent_t *gathered_bucket;  // [buckets] its weights are up to date on every data rank

    Acts *slots;        // [plan.slots] micro-batches in flight: the schedule says how many

    // The loss has the largest buffer, so its gradient takes the place of the logits.
    floatX *logits;     // (N, Vl)      become their own gradient
    float *row_max;     // (N)          the largest logit of a token
    float *row_max_local;  // (N)       and the largest of this rank
    float *row_sums;    // (2, N)       sum of the exponentials; logit of the target

    // One layer is at work at a time, so one set of these serves all.
    floatX *proj;       // (N, C)       output of a projection
    floatX *dresidual;  // (Nl, C)      gradient of the residual stream
    floatX *dnorm;      // (N, C)       gradient of a layernorm's output; (N, A) of atty
    floatX *reduced;    // (Nl, C)      proj, summed over the ranks: in its place if Nl = N
    floatX *dreduced;   // (Nl, C)      and dnorm
    floatX *gathered;   // (N, C)       rows of all ranks: f's output
    floatX *dgathered;  // (N, C)       and g's output in backward
    floatX *dqkv;       // (N, S)
    floatX *dfch;       // (R, G F)
    floatX *dact;       // (R, F)
    floatX *rows;       // (R, C)       on their way to or from the experts
    floatX *arrived;    // (R, C)       and where they come to
    float *dlogits;     // (N, E)       gradient of the router's logits
    float *dattention;  // (B, NHl, T)  scratch of attention's backward pass
    float *scratch;     // partial sums over rows, for gradients of biases and layernorms
};

// Sets this rank's sizes that GPT-2 does not have.
static void set_sizes(GPT *m, size_t t) {
    m->HS = m->llama.HS;
    m->A = m->NHl * m->HS;
    m->KVl = m->llama.KV / t;
    m->K = m->KVl * m->HS;
    m->S = m->A + 2 * m->K;
    m->G = m->llama.type == NEMOTRON ? 1 : 2;
    m->head = m->llama.tied ? (int)WTE : (int)HEADW;
}

// The ranks that hold the same bucket, and this rank's part of it.
struct Holders {
    ncclComm_t comm;
    size_t count;  // ranks
    size_t part;   // elements of the bucket that each rank owns
    size_t mine;   // and where this rank's part begins
};

// Returns the holders of bucket b: all d ranks, also if they share a sequence, or for
// experts every e-th of them. That is one rank of each group that shares the experts out.
static Holders holders(const GPT *m, size_t b) {
    bool experts = m->moe.E && bucket_of_experts(&m->table, b);
    size_t e = experts ? m->experts.e : 1;
    size_t count = m->grid.d / e;
    size_t part = (m->table.buckets[b + 1] - m->table.buckets[b]) / count;
    size_t rank = m->grid.d_rank / e;
    return {experts ? m->experts.alike : m->data, count, part, rank * part};
}

// Makes this data rank the owner of its part of every bucket.
static void own_buckets(GPT *m, State *state) {
    for (size_t b = 0; b < bucket_count(m); b++) {
        Holders h = holders(m, b);
        state_own(state, m->table.buckets[b] + h.mine, h.part);
    }
}

// A layer's first bucket: all of it, or all but its experts, which are the next one.
static size_t layer_bucket(const GPT *m, size_t l) {
    return BUCKET_LAYERS + l * (m->moe.E ? 2 : 1);
}

// Takes this rank's part of every layer of its stage, and of the vocabulary. It holds 1/e of
// the experts, each cut over the tensor ranks. It owns its part of the reduced gradients of
// each bucket, and with ZeRO the same part of the optimizer.
static void shard(GPT *m) {
    size_t t = m->grid.t;
    trainer_sizes(m, t);
    set_sizes(m, t);
    m->V0 = m->grid.t_rank * m->Vl;
    if (m->opt.sequence_parallel)
        m->sp = t;

    m->plan = trainer_plan(m);
    Shard mine = shard_whole(&m->config);
    mine.t = t;
    mine.t_rank = m->grid.t_rank;

    mine.embedding = m->grid.p_rank == 0;
    mine.head = m->grid.p_rank == m->grid.p - 1;
    mine.n_layers = m->plan.layer_count;
    mine.layers = m->plan.layers;

    mine.bucket_align = TENSOR_ALIGN * m->grid.d;

    mine.e = t;  // what table_make cuts an expert's tensors over
    mine.e_rank = m->grid.t_rank;
    trainer_shard(m, mine);
    if (m->moe.E)
        table_keep_experts(&m->table, m->moe.E, m->experts.e, m->grid.d_rank % m->experts.e);

    own_buckets(m, &m->share);
    if (m->opt.zero)
        own_buckets(m, &m->state);
}

// Returns the rows that meet the weights of an MLP: B sequences, or the places of all
// experts.
static size_t rows_of_mlp(const GPT *m, size_t B) {
    return m->moe.E ? moe_rows(m->moe, B) : B * m->T;
}

// Takes memory for the activations of one micro-batch. Recomputed activations live only
// while one layer is at work, so all layers of all slots share the first one's buffers.
static void layout_acts(GPT *m, Arena *arena, Acts *acts) {
    size_t N = m->B * m->T, Nl = N / m->sp;
    size_t C = m->config.C, A = m->A, F = m->F;
    size_t L = m->plan.most_layers;
    size_t R = rows_of_mlp(m, m->B);
    host_array(acts->layers, L);
    host_array(acts->residual, L + 1);

    // The input of each layer is always kept: the layer can be computed again from it.
    for (size_t l = 0; l <= L; l++)
        take(arena, acts->residual[l], Nl * C);

    for (size_t l = 0; l < L; l++) {
        LayerActs *a = &acts->layers[l];
        LayerActs *first = &m->slots[0].layers[0];
        if (m->opt.recompute == RECOMPUTE_LAYER && a != first) {
            *a = *first;  // all but its input, which residual has
            continue;
        }

        take_layernorm(arena, &a->ln1, Nl, C);
        take(arena, a->qk, m->llama.type == QWEN3 ? N * (m->S - m->K) : 0);
        take(arena, a->qkv, N * m->S);
        take(arena, a->lse, N * m->NHl);
        take(arena, a->atty, N * A);
        take(arena, a->whole, context_is_ulysses(m->context.cut) ? N * A : 0);
        take(arena, a->residual2, Nl * C);
        take_layernorm(arena, &a->ln2, Nl, C);

        take(arena, a->fch, R * m->G * F);
        if (m->opt.recompute == RECOMPUTE_GELU && a != first)
            a->fch_act = first->fch_act;
        else
            take(arena, a->fch_act, R * F);

        if (!m->moe.E) continue;

        take_routing(arena, &a->routing, m->moe, m->B, m->T, m->flags.context.c);
        take(arena, a->expert_in, R * C);
        take(arena, a->expert_out, R * C);
    }
    if (m->table.shard.head)
        take_layernorm(arena, &acts->lnf, Nl, C);
}

// Points w[l][FCW] and so on to the weights of the first expert that this rank holds. The
// others follow in steps of expert_step.
static void first_experts(GPT *m) {
    for (size_t i = m->table.count; i-- > 0;) {
        const Tensor *x = &m->table.tensors[i];
        m->w[x->held][x->spec->kind] = m->state.params + x->offset;
        m->dw[x->held][x->spec->kind] = m->state.grads + x->offset;
    }
}

// True if a window or a document hides a key from a query.
static bool hides_keys(const GPT *m) {
    size_t window = m->llama.window;
    return m->flags.documents.apart || (window && window < m->opt.seq);
}

// Takes memory for every buffer: called once to count bytes, and once to set pointers, so
// that --dry-run prints the bytes that training takes.
static void layout(GPT *m) {
    size_t N = m->B * m->T, Nl = N / m->sp;
    size_t C = m->config.C, A = m->A, F = m->F, S = m->S;
    size_t wide = C > A ? C : A;
    size_t E = m->moe.E, R = rows_of_mlp(m, m->B);

    Arena *arena = trainer_layout(m);
    first_experts(m);

    // the loss
    if (m->table.shard.head)
        take(arena, m->logits, N * m->Vl);
    take(arena, m->row_max, N);
    take(arena, m->row_max_local, N);
    take(arena, m->row_sums, 2 * N);

    // one layer at a time
    take(arena, m->proj, N * C);
    take(arena, m->dresidual, Nl * C);
    take(arena, m->dnorm, N * wide);
    take(arena, m->dqkv, N * S);
    take(arena, m->dfch, R * m->G * F);
    take(arena, m->dact, R * F);
    take(arena, m->dattention, N * m->NHl);
    take(arena, m->scratch, reduce_scratch_floats(N, wide, S > E * C ? S : E * C));
    take(arena, m->angles, m->T * m->HS);
    take(arena, m->angles_alone, m->T * m->HS);
    if (hides_keys(m))
        take(arena, m->first, m->micros * N * m->flags.context.c);

    // experts and the ring
    take(arena, m->rows, E ? R * C : 0);
    take(arena, m->arrived, E ? R * C : 0);
    take(arena, m->dlogits, N * E);
    take_statistics(arena, &m->statistics, m->config.L, m->moe);
    take_context(arena, &m->context, N, A, m->NHl, m->K);

    // The sum of all rows takes the place of the partial one. A rank's rows of it have a
    // buffer of their own.
    m->reduced = m->proj;
    m->dreduced = m->dnorm;
    if (m->sp > 1) {
        take(arena, m->reduced, Nl * C);
        take(arena, m->dreduced, Nl * C);
        take(arena, m->gathered, N * C);
        take(arena, m->dgathered, N * C);
    }

    // links
    size_t message = m->grid.p > 1 ? N * C / m->grid.t : 0;
    for (StepKind kind : {STEP_FORWARD, STEP_BACKWARD}) {
        for (int b = 0; b < PIPELINE_BUFFERS; b++) {
            take(arena, m->receive[kind].buffer[b], message);
            take(arena, m->send[kind].buffer[b], message);
        }
    }

    // all layers of all micro-batches in flight
    host_array(m->slots, m->plan.slots);
    for (size_t i = 0; i < m->plan.slots; i++)
        layout_acts(m, arena, &m->slots[i]);
}

// ----------------------------------------------------------------------------------------
// Windows and documents

// Finds the first key that each query of sequence i of a batch sees: of its window, or of
// its document if that begins later. Positions do not begin again with a document: RoPE
// turns a query and a key by the difference of their positions, which is the same. The
// sequence is cut over ranks that have T tokens each, and keys of another rank have rows of
// their own.
static void find_keys(GPT *m, Context cut, size_t i, const int *tokens, size_t T) {
    size_t whole = cut.c > 1 ? T * cut.c : T;
    int *first = m->whole_first;
    document_keys(first, tokens, whole, m->eot);
    window_keys(first, first, whole, m->llama.window);
    context_rows(cut, m->host_first, m->scores, first, i, m->B, T);
}

// Takes each sequence of a batch that the trainer reads.
static void see_sequence(Trainer *trainer, size_t i, const int *tokens) {
    GPT *m = static_cast<GPT *>(trainer);
    find_keys(m, m->flags.context, i, tokens, m->T);
}

// Prepares the warm-up and simulations, which see sequences of one document.
static void start_keys(GPT *m) {
    size_t sequences = m->micros * m->B;
    int *tokens = NULL;
    if (!hides_keys(m)) return;
    pinned_array(m->host_first, sequences * m->opt.seq);
    host_array(m->whole_first, m->opt.seq);
    host_array(m->scores, m->micros * m->flags.context.c);
    host_array(tokens, m->opt.seq);
    for (size_t t = 0; t < m->opt.seq; t++)
        tokens[t] = m->eot + 1;  // not the one that begins a document
    for (size_t i = 0; i < sequences; i++)
        see_sequence(m, i, tokens);
    free(tokens);
    m->see_sequence = see_sequence;
}

// Copies the first keys of N tokens to the device.
static void copy_keys(GPT *m, size_t N) {
    if (!m->first) return;
    size_t bytes = N * m->flags.context.c * sizeof(int);
    CUDA_CHECK(cudaMemcpyAsync(m->first, m->host_first, bytes, cudaMemcpyHostToDevice,
                               m->stream));
}

// Takes the keys of a micro-batch.
static void keys_at(GPT *m, size_t micro) {
    if (!m->first) return;
    size_t steps = context_steps(m->context.cut);
    int *first = m->first + micro * m->B * m->opt.seq;
    m->keys = {first, m->scores + micro * steps};
}

// ----------------------------------------------------------------------------------------
// Operators f and g
//
// A product by columns needs all of its input and makes some columns of its output. One by
// rows needs these columns only, and makes a summand of all of its output. So the two fit
// together, and a pair of them has one operator before it and one behind it.

// Sums partial (N, C) over the tensor ranks into out (Nl, C): all rows of it, or under
// sequence parallelism each rank its own.
static void tensor_sum(GPT *m, floatX *out, const floatX *partial, size_t N, cudaStream_t s) {
    size_t count = N / m->sp * m->config.C;
    Span span(m, s, m->sp > 1 ? "reduce-scatter" : "all-reduce");
    if (m->sp > 1)
        NCCL_CHECK(ncclReduceScatter(partial, out, count, NCCL_FLOATX, ncclSum, m->tensor, s));
    else
        NCCL_CHECK(ncclAllReduce(partial, out, count, NCCL_FLOATX, ncclSum, m->tensor, s));
}

// Under sequence parallelism gathers the rows of all tensor ranks, x (Nl, C) -> out (N, C),
// and returns out. Else every rank has all rows: returns x.
static const floatX *tensor_gather(GPT *m, floatX *out, const floatX *x, size_t N,
                                   cudaStream_t s) {
    if (m->sp == 1) return x;
    Span span(m, s, "all-gather");
    NCCL_CHECK(ncclAllGather(x, out, N / m->sp * m->config.C, NCCL_FLOATX, m->tensor, s));
    return out;
}

// Operator f stands before a pair. In forward every rank takes the same input, and under
// sequence parallelism gathers it. So backward sums the gradients of all ranks.
static const floatX *f_forward(GPT *m, const floatX *x, size_t N) {
    return tensor_gather(m, m->gathered, x, N, m->stream);
}

// Gathers f's output for backward, as forward did not keep it. It has a stream of its
// own, so products that do not read it overlap the gather. Now two streams use one
// communicator, which needs the same order on all ranks. Events put each collective
// behind the one before.
static const floatX *f_gather_again(GPT *m, const floatX *x) {
    if (m->sp == 1) return x;
    CUDA_CHECK(cudaEventRecord(m->computed, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(m->tensor_stream, m->computed, 0));
    tensor_gather(m, m->gathered, x, m->B * m->T, m->tensor_stream);
    CUDA_CHECK(cudaEventRecord(m->gathered_ready, m->tensor_stream));
    return m->gathered;
}

// Starts the sum of dnorm. The product for the weight's gradient needs no sum and overlaps
// it. It reads the rows gathered last, so the compute stream waits for them here.
static void f_backward_begin(GPT *m) {
    if (m->grid.t == 1) return;
    CUDA_CHECK(cudaEventRecord(m->computed, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(m->tensor_stream, m->computed, 0));
    tensor_sum(m, m->dreduced, m->dnorm, m->B * m->T, m->tensor_stream);
    CUDA_CHECK(cudaEventRecord(m->reduced_ready, m->tensor_stream));
    if (m->sp > 1)
        wait_for(m, m->gathered_ready, "wait tensor");
}

// Waits for the sum, (Nl, C), and returns it.
static const floatX *f_backward_end(GPT *m) {
    if (m->grid.t > 1)
        wait_for(m, m->reduced_ready, "wait tensor");
    return m->dreduced;
}

// Operator g stands behind a pair, and is f turned round. Forward sums the summands of
// all ranks. In backward every rank takes the same gradient. Returns out.
static const floatX *g_forward(GPT *m, floatX *out, const floatX *partial, size_t N) {
    if (m->grid.t > 1)
        tensor_sum(m, out, partial, N, m->stream);
    return out;
}

// Returns all N rows of dout, so the gradients of the biases behind g need no sum over
// the ranks.
static const floatX *g_backward(GPT *m, const floatX *dout) {
    return tensor_gather(m, m->dgathered, dout, m->B * m->T, m->stream);
}

// Sums the partial gradients in elements [lo, hi) over the tensor ranks.
//   Norms of q and k: a rank has the gradient of its own heads.
//   Routers: a rank has the gradient of its summand of the experts' results.
//   Other norms, under sequence parallelism: a rank has the gradient of its own rows.
static void reduce_partial(GPT *m, size_t lo, size_t hi) {
    if (m->grid.t == 1) return;

    NCCL_CHECK(ncclGroupStart());
    for (size_t i = 0; i < m->table.count; i++) {
        const Tensor *x = &m->table.tensors[i];
        int kind = x->spec->kind;
        bool partial = kind == QNORMW || kind == KNORMW || kind == ROUTER;
        if (m->sp > 1)
            partial |= x->spec->flags & TENSOR_NORM;

        if (!partial || x->offset < lo || x->offset >= hi) continue;
        float *dx = m->state.grads + x->offset;
        NCCL_CHECK(ncclAllReduce(dx, dx, x->size, ncclFloat, ncclSum, m->tensor, m->stream));
    }
    NCCL_CHECK(ncclGroupEnd());
}

// ----------------------------------------------------------------------------------------
// Links between pipeline stages
//
// The host only enqueues: it waits for no message, so it need not know which comes first. A
// buffer is filled and emptied in turn, and each side waits for the event of the other. Each
// of t tensor ranks sends 1/t of a message to its counterpart. There all ranks gather it
// (the paper's scatter/gather optimisation). Under sequence parallelism 1/t is enough.

// Receives x (Nl, C) of N tokens from the neighbour: activations or gradients.
static void link_receive(GPT *m, StepKind kind, floatX *x, size_t N, int micro, int chunk) {
    LinkEnd *end = &m->receive[kind];
    if (!end->comm) return;
    size_t b = end->count++ % PIPELINE_BUFFERS, count = N * m->config.C / m->grid.t;

    CUDA_CHECK(cudaStreamWaitEvent(end->stream, end->emptied[b], 0));
    Span span(m, end->stream, "recv", micro, chunk);
    NCCL_CHECK(ncclRecv(end->buffer[b], count, NCCL_FLOATX, 0, end->comm, end->stream));
    CUDA_CHECK(cudaEventRecord(end->filled[b], end->stream));

    wait_for(m, end->filled[b], "wait pipeline");
    if (m->sp > 1 || m->grid.t == 1)
        trainer_copy(m, x, end->buffer[b], count);
    else
        NCCL_CHECK(ncclAllGather(end->buffer[b], x, count, NCCL_FLOATX, m->tensor, m->stream));
    CUDA_CHECK(cudaEventRecord(end->emptied[b], m->stream));
}

// Sends x to the neighbour; later work may overwrite x.
static void link_send(GPT *m, StepKind kind, const floatX *x, size_t N, int micro, int chunk) {
    LinkEnd *end = &m->send[kind];
    if (!end->comm) return;
    size_t b = end->count++ % PIPELINE_BUFFERS, count = N * m->config.C / m->grid.t;
    const floatX *mine = m->sp > 1 ? x : x + m->grid.t_rank * count;

    wait_for(m, end->emptied[b], "wait pipeline");
    trainer_copy(m, end->buffer[b], mine, count);
    CUDA_CHECK(cudaEventRecord(end->filled[b], m->stream));

    CUDA_CHECK(cudaStreamWaitEvent(end->stream, end->filled[b], 0));
    Span span(m, end->stream, "send", micro, chunk);
    NCCL_CHECK(ncclSend(end->buffer[b], count, NCCL_FLOATX, 1, end->comm, end->stream));
    CUDA_CHECK(cudaEventRecord(end->emptied[b], end->stream));
}

// Returns true for the chunk that starts from tokens.
static bool is_first(const GPT *m, size_t chunk) {
    return m->table.shard.embedding && chunk == 0;
}

// Returns true for the chunk that ends in the loss.
static bool is_last(const GPT *m, size_t chunk) {
    return m->table.shard.head && chunk == m->plan.chunks - 1;
}

// ----------------------------------------------------------------------------------------
// Buckets: gradients are summed and weights are gathered over the data ranks

// Sums a bucket of gradients over the ranks that hold it, on a stream of its own, so that
// it overlaps backward. Each rank gets its part of the sum, and without ZeRO all parts.
static void reduce_bucket(GPT *m, size_t bucket) {
    size_t lo = m->table.buckets[bucket], hi = m->table.buckets[bucket + 1];
    Holders h = holders(m, bucket);
    float *grads = m->state.grads + lo;
    float *mine = grads + h.mine;

    reduce_partial(m, lo, hi);
    if (h.count == 1 || h.part == 0) return;

    cudaStream_t s = m->data_stream;
    CUDA_CHECK(cudaEventRecord(m->bucket_done, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(s, m->bucket_done, 0));
    Span span(m, s, "reduce-scatter");
    NCCL_CHECK(ncclReduceScatter(grads, mine, h.part, ncclFloat, ncclSum, h.comm, s));
    // Without ZeRO every rank updates all weights, so it needs all sums.
    if (!m->opt.zero)
        NCCL_CHECK(ncclAllGather(mine, grads, h.part, ncclFloat, h.comm, s));
}

// Gathers the updated weights of all buckets, in the order in which forward needs them.
static void gather_weights(GPT *m) {
    if (m->grid.d == 1 || !m->opt.zero) return;

    cudaStream_t s = m->data_stream;
    CUDA_CHECK(cudaEventRecord(m->bucket_done, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(s, m->bucket_done, 0));

    for (size_t b = 0; b < bucket_count(m); b++) {
        Holders h = holders(m, b);
        if (h.part == 0) continue;
        floatX *params = m->state.params + m->table.buckets[b];
        floatX *mine = params + h.mine;

        Span span(m, s, "all-gather");
        NCCL_CHECK(ncclAllGather(mine, params, h.part, NCCL_FLOATX, h.comm, s));
        CUDA_CHECK(cudaEventRecord(m->gathered_bucket[b], s));
        // Without overlap the next forward waits for all buckets.
        if (!m->opt.overlap)
            CUDA_CHECK(cudaStreamWaitEvent(m->stream, m->gathered_bucket[b], 0));
    }
}

// Returns true if this micro-batch's backward completes buckets of gradients, and their sums
// may overlap the rest of backward.
static bool reduce_now(const GPT *m, int micro) {
    return m->opt.overlap && (size_t)micro + 1 == m->micros;
}

// Waits on the device until a bucket's weights have been gathered: called before they are
// read.
static void use_bucket(GPT *m, size_t bucket) {
    if (m->grid.d > 1 && m->opt.zero)
        wait_for(m, m->gathered_bucket[bucket], "wait data");
}

// ----------------------------------------------------------------------------------------
// Forward and backward

// A norm of Nl rows of x.
static void norm_forward(GPT *m, Layernorm ln, const floatX *x, floatX **w, int weight,
                         size_t Nl) {
    bool rms = m->llama.type != NEMOTRON;
    auto norm = rms ? layernorm_forward<NORM_RMS> : layernorm_forward<NORM_1P>;
    norm(ln, x, w[weight], w[weight + 1], Nl, m->config.C, m->stream,
         (float)m->llama.epsilon);
}

// The same of residual = x + branch.
static void norm_residual_forward(GPT *m, Layernorm ln, floatX *residual, const floatX *x,
                                  const floatX *branch, floatX **w, int weight, size_t Nl) {
    bool rms = m->llama.type != NEMOTRON;
    auto norm = rms ? layernorm_residual_forward<NORM_RMS> : layernorm_residual_forward<NORM_1P>;
    norm(residual, ln, x, branch, NULL, w[weight], w[weight + 1], Nl, m->config.C, m->stream,
         Dropout(), (float)m->llama.epsilon);
}

// Turns dout, the gradient of a norm's output, into the gradient of its input x. Adds the
// gradient that went past the norm (add_to). Both are in dresidual.
static void norm_backward(GPT *m, size_t l, int weight, const floatX *dout, const floatX *x,
                          Layernorm ln, const floatX *add_to, size_t Nl, bool add) {
    float **dw = m->dw[l];
    bool rms = m->llama.type != NEMOTRON;
    auto backward = rms ? layernorm_backward<NORM_RMS> : layernorm_backward<NORM_1P>;
    backward(m->dresidual, dw[weight], dw[weight + 1], m->scratch, add_to, dout, x,
             m->w[l][weight], ln, Nl, m->config.C, add, m->stream);
}

// The norms of the heads of q and k, of layer l.
static HeadNorm head_norm_of(GPT *m, size_t l, floatX *qkv, floatX *qk, size_t N) {
    floatX **w = m->w[l];
    return {qkv, qk, w[QNORMW], w[KNORMW], N, m->NHl, m->KVl, m->HS, (float)m->llama.epsilon};
}

// Turns q and k in place by the angle of their position; sign -1 turns their gradients back.
static void turn(GPT *m, floatX *qkv, size_t N, size_t T, float sign) {
    size_t D = llama_rotary(&m->llama, m->HS);
    const float *angles = m->context.cut.c > 1 ? m->angles : m->angles_alone;
    rope(qkv, angles, N, T, m->NHl + m->KVl, m->HS, D, m->S, sign, m->stream);
}

// (N, G F) -> (N, F)
static void activation_forward(GPT *m, floatX *out, const floatX *inp, size_t N) {
    if (m->G == 2)
        swiglu_forward(out, inp, N, m->F, m->stream);
    else
        relu2_forward(out, inp, N * m->F, m->stream);
}

// (N, F) -> (N, G F)
static void activation_backward(GPT *m, floatX *dinp, const floatX *dout, const floatX *inp,
                                size_t N) {
    if (m->G == 2)
        swiglu_backward(dinp, dout, inp, N, m->F, m->stream);
    else
        relu2_backward(dinp, dout, inp, N * m->F, m->stream);
}

// ----------------------------------------------------------------------------------------
// Experts

// Counts the choices (B, E) of whole sequences, which their losses for balance need.
static void count_tokens(GPT *m, Routing r, size_t B) {
    ContextRanks *x = &m->context;
    if (x->cut.c <= 1) return;
    Span span(m, m->stream, "all-reduce");
    NCCL_CHECK(ncclAllReduce(r.tokens, r.whole, B * m->moe.E, ncclFloat, ncclSum, x->sums,
                             m->stream));
}

// Adds the choices of layer l's router to the statistics of --log. Tensor ranks route alike, so
// one of them counts.
static void log_choices(GPT *m, size_t l, const Routing &r, size_t B, size_t T) {
    if (m->grid.t_rank == 0)
        statistics_add(m, &m->statistics, m->plan.layers[l], r, m->moe, B, T,
                       m->flags.context.c);
}

// x (N, C) -> a->expert_out (R, C). Experts stand between f and g, as an MLP does. Each
// tensor rank has all N rows, routes them alike, and makes its summand of the results.
static void experts_forward(GPT *m, size_t l, LayerActs *a, const floatX *x, size_t B,
                            size_t T) {
    size_t C = m->config.C, F = m->F, GF = m->G * F;
    size_t El = m->moe.E / m->experts.e;
    size_t R = moe_rows(m->moe, B);
    size_t Re = R / El;
    size_t step = expert_step(C, F);
    floatX **w = m->w[l];
    Matmul *mm = &m->matmul;
    cudaStream_t s = m->stream;

    // A token goes to the k experts to which the router gives the largest probabilities.
    moe_route(a->routing, x, w[ROUTER], m->moe, B, T, C, s);
    count_tokens(m, a->routing, B);
    moe_gather(m->rows, x, a->routing, m->moe, B, C, false, s);
    experts_exchange(m, &m->experts, m->moe, a->expert_in, m->rows, B, false);

    // an MLP of each expert: gate and up are one product, and rows of all experts one
    // activation
    for (size_t i = 0; i < El; i++) {
        const floatX *in = a->expert_in + i * Re * C;
        floatX *fch = a->fch + i * Re * GF;
        linear_forward(mm, fch, in, w[FCW] + i * step, NULL, Re, C, GF);
    }
    activation_forward(m, a->fch_act, a->fch, R);
    for (size_t i = 0; i < El; i++) {
        const floatX *act = a->fch_act + i * Re * F;
        floatX *result = m->rows + i * Re * C;
        linear_forward(mm, result, act, w[FCPROJW] + i * step, NULL, Re, F, C);
    }

    // The results go back, each to be weighted by the router's probability.
    experts_exchange(m, &m->experts, m->moe, a->expert_out, m->rows, B, true);
}

// Takes dout (N, C), the gradient of the weighted sum. Leaves a summand of the gradient of
// the input ln2 (N, C) in m->dnorm (N, C).
static void experts_backward(GPT *m, size_t l, LayerActs *a, const floatX *dout,
                             const floatX *ln2, bool add) {
    size_t B = m->B, T = m->T, N = B * T;
    size_t C = m->config.C, F = m->F, GF = m->G * F;
    size_t E = m->moe.E, El = E / m->experts.e;
    size_t R = moe_rows(m->moe, B);
    size_t Re = R / El;
    size_t step = expert_step(C, F);
    floatX **w = m->w[l];
    float **dw = m->dw[l];
    Matmul *mm = &m->matmul;
    cudaStream_t s = m->stream;

    // The gradient of a token goes to its experts, weighted as their results were.
    moe_backward_router(m->dlogits, dout, a->expert_out, a->routing, m->moe, m->dloss, B, T,
                        C, s);
    moe_gather(m->rows, dout, a->routing, m->moe, B, C, true, s);
    experts_exchange(m, &m->experts, m->moe, m->arrived, m->rows, B, false);

    // an MLP of each expert
    for (size_t i = 0; i < El; i++) {
        const floatX *dy = m->arrived + i * Re * C;
        size_t hidden = i * Re * F;
        const floatX *act = a->fch_act + hidden;
        const floatX *down = w[FCPROJW] + i * step;
        float *ddown = dw[FCPROJW] + i * step;
        linear_backward_input(mm, m->dact + hidden, dy, down, Re, F, C);
        linear_backward_weight(mm, ddown, act, dy, Re, F, C, add);
    }
    activation_backward(m, m->dfch, m->dact, a->fch, R);
    for (size_t i = 0; i < El; i++) {
        size_t in = i * Re * C;
        const floatX *dfch = m->dfch + i * Re * GF;
        const floatX *gate_up = w[FCW] + i * step;
        float *dgate_up = dw[FCW] + i * step;
        linear_backward_input(mm, m->rows + in, dfch, gate_up, Re, C, GF);
        linear_backward_weight(mm, dgate_up, a->expert_in + in, dfch, Re, C, GF, add);
    }

    // Gradients of their inputs come back, and the router's joins them: of its losses for
    // balance and for small logits, too.
    experts_exchange(m, &m->experts, m->moe, m->arrived, m->rows, B, true);
    moe_backward_input(m->dnorm, m->arrived, m->dlogits, w[ROUTER], a->routing, m->moe, N, C,
                       s);

    f_backward_begin(m);
    moe_backward_weight(dw[ROUTER], m->scratch, m->dlogits, ln2, N, C, E, add, s);
}

// Runs one layer, x (Nl, C) -> out (Nl, C). Attention lets each token look at the tokens
// before it. The MLP looks at each token alone. Both add to the residual stream.
static void layer_forward(GPT *m, size_t l, LayerActs *a, floatX *out, const floatX *x,
                          size_t B, size_t T) {
    size_t N = B * T, Nl = N / m->sp;
    size_t C = m->config.C, A = m->A, F = m->F;
    floatX **w = m->w[l];
    Matmul *mm = &m->matmul;
    cudaStream_t s = m->stream;

    // attention: several queries share a key and a value
    norm_forward(m, a->ln1, x, w, LN1W, Nl);
    const floatX *ln1 = f_forward(m, a->ln1.out, N);
    linear_forward(mm, a->qkv, ln1, w[QKVW], w[QKVB], N, C, m->S);
    if (w[QNORMW])
        head_norm_forward(head_norm_of(m, l, a->qkv, a->qk, N), s);
    turn(m, a->qkv, N, T, 1);
    context_forward(m, &m->context, a->atty, a->whole, a->lse, a->qkv, m->keys, B, T, A,
                    m->NHl, m->KVl);
    linear_forward(mm, m->proj, a->atty, w[PROJW], NULL, N, A, C);
    const floatX *proj = g_forward(m, m->reduced, m->proj, N);

    // The sum and the next norm are one kernel: the row is read once.
    norm_residual_forward(m, a->ln2, a->residual2, x, proj, w, LN2W, Nl);

    // the MLP: gate and up are one product; or experts, each with 1/t of its hidden units
    const floatX *ln2 = f_forward(m, a->ln2.out, N);
    if (m->moe.E) {
        experts_forward(m, l, a, ln2, B, T);
    } else {
        linear_forward(mm, a->fch, ln2, w[FCW], NULL, N, C, m->G * F);
        activation_forward(m, a->fch_act, a->fch, N);
    }
    if (!out) return;  // Backward computes a layer again up to here: it reads no more.

    if (m->moe.E) {
        log_choices(m, l, a->routing, B, T);
        moe_combine(m->proj, NULL, a->expert_out, a->routing, m->moe, N, C, s, Dropout());
    } else {
        linear_forward(mm, m->proj, a->fch_act, w[FCPROJW], NULL, N, F, C);
    }
    proj = g_forward(m, m->reduced, m->proj, N);
    residual_forward<NORM_RMS>(out, a->residual2, proj, NULL, Nl, C, s, Dropout());
}

// Runs one layer backward. dresidual (Nl, C), the gradient of its output, becomes the
// gradient of its input x. The gradient of a matrix product is two products, one for its
// input and one for its weight. Gradients of weights are sums over the micro-batches: the
// first one writes them, the others add to them (add).
static void layer_backward(GPT *m, size_t l, LayerActs *a, const floatX *x, bool add) {
    size_t B = m->B, T = m->T;
    size_t N = B * T, Nl = N / m->sp;
    size_t C = m->config.C, A = m->A, F = m->F, S = m->S;
    floatX **w = m->w[l];
    float **dw = m->dw[l];
    floatX *dresidual = m->dresidual;
    Matmul *mm = &m->matmul;
    cudaStream_t s = m->stream;

    // First recompute the buffers that forward did not keep: the whole layer from its
    // input, or only GELU's output from the hidden units.
    if (m->opt.recompute == RECOMPUTE_LAYER)
        layer_forward(m, l, a, NULL, x, B, T);
    if (m->opt.recompute == RECOMPUTE_GELU)
        activation_forward(m, a->fch_act, a->fch, rows_of_mlp(m, B));

    // the MLP: a product's gradient for its input, then for its weight
    const floatX *dout = g_backward(m, dresidual);
    const floatX *ln2 = f_gather_again(m, a->ln2.out);
    if (m->moe.E) {
        experts_backward(m, l, a, dout, ln2, add);
    } else {
        linear_backward_input(mm, m->dact, dout, w[FCPROJW], N, F, C);
        linear_backward_weight(mm, dw[FCPROJW], a->fch_act, dout, N, F, C, add);
        activation_backward(m, m->dfch, m->dact, a->fch, N);
        linear_backward_input(mm, m->dnorm, m->dfch, w[FCW], N, C, m->G * F);
        f_backward_begin(m);
        linear_backward_weight(mm, dw[FCW], ln2, m->dfch, N, C, m->G * F, add);
    }
    const floatX *dln2 = f_backward_end(m);

    // residual2 has gone past the MLP as well as through it: both gradients add up.
    norm_backward(m, l, LN2W, dln2, a->residual2, a->ln2, dresidual, Nl, add);

    // attention: its backward pass computes the scores again, which are too many to keep
    dout = g_backward(m, dresidual);
    const floatX *ln1 = f_gather_again(m, a->ln1.out);
    linear_backward_input(mm, m->dnorm, dout, w[PROJW], N, A, C);
    linear_backward_weight(mm, dw[PROJW], a->atty, dout, N, A, C, add);
    context_backward(m, &m->context, m->dqkv, m->dattention, m->dnorm, a->atty, a->whole,
                     a->lse, a->qkv, m->keys, B, T, A, m->NHl, m->KVl);
    turn(m, m->dqkv, N, T, -1);
    if (w[QNORMW])
        head_norm_backward(head_norm_of(m, l, m->dqkv, a->qk, N), dw[QNORMW], dw[KNORMW],
                           m->scratch, add, s);
    linear_backward_input(mm, m->dnorm, m->dqkv, w[QKVW], N, C, S);
    f_backward_begin(m);
    linear_backward_weight(mm, dw[QKVW], ln1, m->dqkv, N, C, S, add);
    if (w[QKVB])
        bias_backward(dw[QKVB], m->dqkv, m->scratch, N, S, add, s);
    const floatX *dln1 = f_backward_end(m);

    // x has gone past attention, too. dresidual is now the gradient of the layer before.
    norm_backward(m, l, LN1W, dln1, x, a->ln1, dresidual, Nl, add);
}

// Runs one chunk: tokens (B, T), or residual[0] from the chunk before -> lnf (Nl, C), or
// residual[L] for the next one. The residual stream begins with a token's row of wte. A rank
// looks up the tokens of its part of the vocabulary.
static void forward(GPT *m, Acts *acts, const int *inputs, size_t B, size_t T, int micro,
                    int chunk) {
    size_t N = B * T, Nl = N / m->sp;
    size_t C = m->config.C, L = m->plan.count[chunk], first = m->plan.first[chunk];
    floatX **w = m->w[0];
    floatX *x = acts->residual[0];
    cudaStream_t s = m->stream;
    Span span(m, s, "forward", micro, chunk);

    if (is_first(m, chunk)) {
        use_bucket(m, 0);
        floatX *partial = m->sp > 1 ? m->proj : x;
        encoder_forward(partial, inputs, w[WTE], NULL, B, T, C, m->V0, m->Vl, s);
        g_forward(m, x, partial, N);
    }

    for (size_t l = 0; l < L; l++) {
        use_bucket(m, layer_bucket(m, first + l));
        // A layer's experts are the bucket behind its other tensors.
        if (m->moe.E)
            use_bucket(m, layer_bucket(m, first + l) + 1);
        layer_forward(m, first + l, &acts->layers[l], acts->residual[l + 1],
                      acts->residual[l], B, T);
    }

    if (!is_last(m, chunk)) return;
    use_bucket(m, 0);  // the head may be wte
    use_bucket(m, bucket_count(m) - 1);
    norm_forward(m, acts->lnf, acts->residual[L], w, LNFW, Nl);
}

// Computes the micro-batch's losses from lnf (Nl, C). To train, the logits become their own
// gradient, softmax minus target. The gradient of the last layer's output goes to dresidual
// (Nl, C). Both are gradients of the step's mean loss. Every rank has the logits of its
// part of the vocabulary. Only three numbers a token travel: maximum, sum of exponentials,
// logit of the target.
static void loss_and_gradient(GPT *m, Acts *acts, const int *targets, int micro,
                              bool training) {
    size_t N = m->B * m->T, Nl = N / m->sp;
    size_t C = m->config.C, L = m->plan.count[m->plan.chunks - 1];
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

    // A softmax by its largest logit does not overflow.
    const floatX *lnf = f_forward(m, acts->lnf.out, N);
    linear_forward(mm, m->logits, lnf, w[m->head], NULL, N, C, Vl);
    float *local = m->row_max_local;
    classifier_stats(local, sum, target, m->logits, targets, N, V, Vl, V0, s);
    NCCL_CHECK(ncclAllReduce(local, m->row_max, N, ncclFloat, ncclMax, m->tensor, s));
    classifier_rescale(sum, local, m->row_max, N, s);
    NCCL_CHECK(ncclAllReduce(sum, sum, 2 * N, ncclFloat, ncclSum, m->tensor, s));
    classifier_gradient(losses, m->logits, m->row_max, sum, target, targets,
                        m->dloss, N, V, Vl, V0, training, s);

    // Losses are summed in double and in a fixed order, so that the sum is reproducible.
    loss_sum(&m->loss_sums[micro], losses, N, s);
    if (!training) return;

    // Backward begins: through the head, and through the last layernorm.
    linear_backward_input(mm, m->dnorm, m->logits, w[m->head], N, C, Vl);
    f_backward_begin(m);
    linear_backward_weight(mm, dw[m->head], lnf, m->logits, N, C, Vl, add);
    const floatX *dlnf = f_backward_end(m);
    norm_backward(m, 0, LNFW, dlnf, acts->residual[L], acts->lnf, NULL, Nl, add);
    if (reduce_now(m, micro))
        reduce_bucket(m, bucket_count(m) - 1);
}

// Computes the gradients of one chunk's layers and embeddings. Takes dresidual (Nl, C) as
// loss_and_gradient or the next chunk has left it. If wte is the head, too, the lookup's
// gradient adds to the head's.
static void backward(GPT *m, Acts *acts, const int *inputs, int micro, int chunk) {
    size_t B = m->B, T = m->T, C = m->config.C;
    size_t L = m->plan.count[chunk], first = m->plan.first[chunk];
    float *dwte = m->dw[0][WTE];
    bool add = micro > 0;
    cudaStream_t s = m->stream;
    Span span(m, s, "backward", micro, chunk);

    for (size_t l = L; l-- > 0;) {
        layer_backward(m, first + l, &acts->layers[l], acts->residual[l], add);
        if (reduce_now(m, micro) && m->moe.E)
            reduce_bucket(m, layer_bucket(m, first + l) + 1);
        if (reduce_now(m, micro))
            reduce_bucket(m, layer_bucket(m, first + l));
    }

    if (!is_first(m, chunk)) return;
    const floatX *dout = g_backward(m, m->dresidual);
    encoder_backward(dwte, NULL, dout, inputs, B, T, C, 0, m->V0, m->Vl, add, s);
}

// Run a forward or a backward with its messages: from one neighbour, and to the next one.
static void forward_step(GPT *m, Acts *acts, const int *inputs, size_t B, size_t T, int micro,
                         int chunk) {
    if (!is_first(m, chunk))
        link_receive(m, STEP_FORWARD, acts->residual[0], B * T, micro, chunk);
    forward(m, acts, inputs, B, T, micro, chunk);
    floatX *out = acts->residual[m->plan.count[chunk]];
    if (!is_last(m, chunk))
        link_send(m, STEP_FORWARD, out, B * T, micro, chunk);
}

static void backward_step(GPT *m, Acts *acts, const int *inputs, int micro, int chunk) {
    size_t N = m->B * m->T;
    if (!is_last(m, chunk))
        link_receive(m, STEP_BACKWARD, m->dresidual, N, micro, chunk);
    backward(m, acts, inputs, micro, chunk);
    if (!is_first(m, chunk))
        link_send(m, STEP_BACKWARD, m->dresidual, N, micro, chunk);
}

// Runs this stage's list of steps: all of it to train, only the forwards to validate. The
// logits are made when their gradient is due: one buffer serves all micro-batches in flight.
static void run_batch(GPT *m, bool training) {
    PipelineStep step;
    copy_keys(m, m->micros * m->B * m->T);
    for (size_t i = 0; plan_step(&m->plan, m->micros, &i, &step); i++) {
        size_t micro = step.micro, at = micro * m->B * m->T;
        keys_at(m, micro);
        Acts *acts = &m->slots[training ? m->plan.slot[i] : 0];
        if (step.kind == STEP_FORWARD)
            forward_step(m, acts, m->inputs + at, m->B, m->T, micro, step.chunk);

        StepKind with_loss = training ? STEP_BACKWARD : STEP_FORWARD;
        if (step.kind == with_loss && is_last(m, step.chunk))
            loss_and_gradient(m, acts, m->targets + at, micro, training);
        if (step.kind == STEP_BACKWARD && training)
            backward_step(m, acts, m->inputs + at, micro, step.chunk);
    }
}

// ----------------------------------------------------------------------------------------
// The run

// Runs one step over the next global batch: forward, backward and update. The norm of all
// gradients together decides if AdamW clips them.
static void train_step(GPT *m) {
    StepReport report = trainer_begin_step(m);
    statistics_begin(m, &m->statistics);

    // A head that is wte writes its gradient, and the encoder adds to it. If wte has only
    // one of these uses on a rank, the encoder needs zeros.
    if (m->w[0][WTE] && (m->embedding || m->head != WTE))
        zero_gradient(m, WTE);
    run_batch(m, true);

    // The embeddings are the last to be complete: the encoder adds to the head's gradient.
    for (size_t b = 0; b < bucket_count(m); b++) {
        bool begun = m->opt.overlap && b >= BUCKET_LAYERS;  // by backward
        if (!begun)
            reduce_bucket(m, b);
    }
    CUDA_CHECK(cudaEventRecord(m->reduced_all, m->data_stream));
    if (m->grid.d > 1)
        wait_for(m, m->reduced_all, "wait data");

    // The two stages add what their data ranks have summed. These sums may have been added in
    // another order on each stage, but a + b has the same bits on both: the copies stay equal.
    sum_gradient(m, WTE, m->embedding);
    trainer_norm(m, &report);
    trainer_adamw(m, &report);
    gather_weights(m);
    trainer_end_step(m, &report);
    statistics_end(m, &m->statistics, m->moe);
}

// A sample of T tokens is not cut: each data rank computes all of it, with the same weights
// and the same coin.
static void forward_alone(GPT *m, size_t T) {
    m->context.cut = Context();
    copy_keys(m, T);
    keys_at(m, 0);
    for (size_t c = 0; c < m->plan.chunks; c++)
        forward_step(m, m->slots, m->inputs, 1, T, NO_MICRO, c);
    m->context.cut = m->flags.context;
}

// Appends one token to the sample. Attention looks back only, so the last of its T tokens
// has the logits of the next one, and tokens behind it (padding) do no harm.
static void sample_token(GPT *m) {
    size_t C = m->config.C, last = m->sample.T - 1;
    if (m->first)
        find_keys(m, Context(), 0, m->host_inputs, m->sample.padded);
    forward_alone(m, m->sample.padded);

    if (m->table.shard.head) {
        const floatX *lnf = f_forward(m, m->slots[0].lnf.out, m->sample.padded);
        const floatX *head = m->w[0][m->head];
        linear_forward(&m->matmul, m->logits, lnf + last * C, head, NULL, 1, C, m->Vl);
    }
    sample_append(m, m->logits, m->tensor);
}

// Makes one end of a link, without its communicator.
static void link_end_create(GPT *m, LinkEnd *end, const char *track) {
    end->stream = stream_create(m, track, true);
    for (int b = 0; b < PIPELINE_BUFFERS; b++) {
        event_create(&end->filled[b]);
        event_create(&end->emptied[b]);
    }
}

// Makes the links, all ranks in the same order. Until then no message travels.
static void connect_links(GPT *m) {
    int p = (int)m->grid.p, stage = (int)m->grid.p_rank;
    link_end_create(m, &m->receive[STEP_FORWARD], "receive activations");
    link_end_create(m, &m->send[STEP_FORWARD], "send activations");
    link_end_create(m, &m->receive[STEP_BACKWARD], "receive gradients");
    link_end_create(m, &m->send[STEP_BACKWARD], "send gradients");

    for (int link = 0; link < pipeline_link_count(p); link++) {
        int from, to;
        if (!pipeline_link_ends(p, (int)m->plan.chunks, link, &from, &to)) continue;
        ncclComm_t comm = trainer_link(m, from, to);
        if (stage == from)
            m->send[link / p].comm = comm;
        if (stage == to)
            m->receive[link / p].comm = comm;
    }
}

// Makes the communicators, and a stream for the collectives that overlap
// compute.
static void connect(GPT *m) {
    m->tensor = job_split_grid(&m->job, &m->grid, 't', "tensor", true);
    m->tensor_stream = stream_create(m, "all-reduce", true);
    event_create(&m->computed);
    event_create(&m->reduced_ready);
    event_create(&m->gathered_ready);
    if (m->grid.p > 1 && m->llama.tied)
        m->embedding = job_split_grid(&m->job, &m->grid, 'e', "embedding");

    m->data = job_split_grid(&m->job, &m->grid, 'd', "data");
    m->data_stream = stream_create(m, "data", true);
    event_create(&m->bucket_done);
    event_create(&m->reduced_all);
    host_array(m->gathered_bucket, bucket_count(m));
    for (size_t b = 0; b < bucket_count(m); b++)
        event_create(&m->gathered_bucket[b]);

    context_create(m, &m->context);
    if (m->moe.E)
        experts_create(m, &m->experts, m->tensor);

    // Loading a kernel beside a receive that waits may hang, so all are loaded before links
    // exist.
    trainer_warm_up(m, run_batch);
    forward_alone(m, m->T);  // loads the attention of a sequence that is not cut
    connect_links(m);

    // Messages come last: from here on a rank may wait for another one.
    context_connect(m, &m->context);
    if (m->moe.E)
        experts_connect(m, &m->experts);
}

// Checks the options that the 3D trainer does not have, and takes this rank's tokens.
static bool check_5d(Trainer *trainer, Error *err) {
    GPT *m = static_cast<GPT *>(trainer);
    Options5D *o = &m->flags;
    if (m->opt.dropout > 0)
        return error_set(err, "--dropout: these models have none; leave it out");
    bool from_file = m->opt.init || m->opt.resume;
    if (!document_check(&o->documents, m->config.V, err) ||
        !moe_llama_resolve(&m->model, o, &m->opt, from_file, err))
        return false;

    // Neighbours among the data ranks share a sequence.
    Context cut = o->context;
    m->context.cut = cut;
    m->tokens = context_tokens(cut);

    // Tensor ranks make summands of a router's gradient, and one of them adds its two
    // losses'. A balance loss is a sequence's, and each of its c ranks adds 1/c of it.
    size_t E = m->model.E, k = m->model.k;
    size_t T = m->opt.seq / cut.c;
    size_t slots = o->capacity > 0 ? moe_capacity(o->capacity, T, k, E) : T;
    double losses = m->grid.t_rank == 0;
    float balance = (float)(losses * o->balance / (double)cut.c);
    m->moe = {E, k, slots, balance, (float)(losses * o->z), m->model.normalised};
    m->experts.e = o->e;
    return true;
}

// Makes RoPE's tables, of this rank's T positions and of the first T, once the warm-up has
// left their place.
static void make_angles(GPT *m) {
    size_t D = llama_rotary(&m->llama, m->HS);
    size_t bytes = m->T * D * sizeof(float);
    float *all = NULL;   // (seq, D)
    float *mine = NULL;  // (T, D)
    if (m->opt.simulate) return;  // no data move

    host_array(all, m->opt.seq * D);
    host_array(mine, m->T * D);
    llama_rope_table(&m->llama, all, m->opt.seq, D);
    for (size_t t = 0; t < m->T; t++)
        memcpy(mine + t * D, all + tokens_position(m->tokens, t) * D, D * sizeof(float));
    CUDA_CHECK(cudaMemcpy(m->angles, mine, bytes, cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaMemcpy(m->angles_alone, all, bytes, cudaMemcpyHostToDevice));
    free(all);
    free(mine);
}

// The rows of the command line that the 3D trainer does not have.
static FieldTable options_of(GPT *m) {
    return document_options(rows_5d(&m->flags), &m->flags.documents, "0");
}

int main(int argc, char **argv) {
    static GPT gpt, *m = &gpt;
    moe_llama_make(&m->model);  // It can read a config.json now.
    FieldTable rows = options_of(m);
    Lesson lesson = {rows, check_5d, &m->llama.spec, sizes_5d, tokenizer_open_kind};
    unsigned options = OPTIONS_TENSOR | OPTIONS_PIPELINE | OPTIONS_DATA;
    trainer_open(m, argc, argv, options, lesson);  // Bad input ends here.
    experts_print(&m->model, m->experts.e, m->moe.slots, m->T);
    m->eot = document_token(&m->flags.documents, &m->tokenizer, m->config.V);
    if (m->job.rank == 0)
        documents_print(&m->train_data, &m->progress, m->eot);
    shard(m);
    trainer_allocate(m, layout);
    start_keys(m);
    connect(m);
    make_angles(m);
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
