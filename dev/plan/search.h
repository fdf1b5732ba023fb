// search.h: which layouts there are, which of them are refused or do not fit, and which is
// fastest.
//
// defines: Wish, Search, search_layouts, search_fits, search_smallest, search_free,
//          candidate_less, WISH_SHARDED
//
// Every layout gets a lower bound of its step's time (step_bound: cheap). In the order of the
// bounds it counts memory and simulates, until the next bound is above the worst of the best
// layouts to report. The remaining ones cannot be among these. Nothing depends on time or chance:
// the same question has the same answer.
#ifndef DEV_PLAN_SEARCH_H
#define DEV_PLAN_SEARCH_H

#include "dev/plan/memory.h"

#include <time.h>

enum { SEARCH_BEST = 10, SEARCH_MICRO_BATCH = 64, SEARCH_GPUS = 65536, SEARCH_PIECES = 4096,
       SEARCH_IN_FLIGHT = 3,    // zb-auto keeps once, twice or three times p micro-batches
       SEARCH_STAGES = 24,      // most stages to which layers are dealt by their speed
       SEARCH_TOKENS = 512 };   // fewest tokens of a sequence that context ranks leave each other

static const double WISH_CAPACITY = 1.25;  // of experts, if the wish has none

enum { WISH_SHARDED = -2 };  // of Wish.shard: 2 or 3, which the search chooses

// The request. The search chooses numbers that are 0 and choices that are -1.
typedef struct {
    GPTConfig model;
    int llama;          // of NAMES_5D; 0: a GPT-2
    size_t T, ranks, global_batch;
    size_t c, e;        // context and expert ranks
    double capacity;    // of experts; below 0: WISH_CAPACITY
    size_t t, p, d, v, micro_batch;
    size_t replicas;    // of the model under FSDP
    int schedule, recompute, sequence_parallel, zero;
    int shard;          // 2 or 3: FSDP; 0: none
    int muon;           // 1: Muon updates matrices; 0: AdamW all
    bool no_v;          // no chunks in a V
    const char *order;  // NULL: left to the search
    const char *stages; // --layers-per-stage; NULL: equal, or by speed where nodes are unlike
} Wish;

typedef struct {
    const Cluster *cluster;
    Wish wish;
    Candidate *all;                // [count] in the order of their bounds
    size_t count, room;
    // beaten: not simulated, as their bound is no better than the best.
    size_t listed;                 // layouts that the trainer accepts
    size_t refused, too_large, simulated, beaten;
    char why[sizeof(Error)];       // of one refusal
    Candidate best[SEARCH_BEST];
    size_t found;
    Candidate smallest;            // of the layouts that do not fit
    StepMemo memo;
    bool progress;                 // print how far it is
} Search;

// The orders of the axes, the default first.
static const char *const ORDERS[] = {"tdp", "tpd", "dtp", "dpt", "ptd", "pdt"};
enum { ORDER_COUNT = 6 };

static inline int order_number(const char *order) {
    int i = 0;
    while (i < ORDER_COUNT - 1 && strcmp(ORDERS[i], order) != 0) i++;
    return i;
}

static inline bool cluster_is_unlike(const Cluster *c) {
    return c->network[NETWORK_ETHERNET][0] > 0;
}

// The places of a layout's groups and messages. Its time depends on the order only through them.
typedef struct {
    Placement tensor, data, ends;
    double forward, wrapped;  // s of a message to the next stage, and from the last to the first
} OrderPlaces;

static inline OrderPlaces order_places(const Cluster *c, const StepLayout *layout,
                                       const char *order, size_t stage) {
    StepLayout r = *layout;
    OrderPlaces x;
    memset(&x, 0, sizeof x);
    strcpy(r.order, order);
    Grid g = step_grid(c, &r);
    x.tensor = step_group(c, &g, stage, 't'), x.data = step_group(c, &g, stage, 'd');
    x.ends = step_group(c, &g, stage, 'e');
    if (r.p > 1) x.forward = step_send(c, &r, &g, stage), x.wrapped = step_send(c, &r, &g, r.p - 1);
    return x;
}

static inline bool placement_same(const Placement *a, const Placement *b) {
    return a->nodes == b->nodes && a->per_node == b->per_node && a->sharing == b->sharing &&
           a->islands == b->islands && a->crossing == b->crossing && a->network == b->network;
}

// True if an earlier order gives the same places, on unlike nodes at every stage.
static inline bool order_is_double(const Cluster *c, const StepLayout *r, int number) {
    for (int i = 0; i < number; i++) {
        bool same = true;
        for (size_t stage = 0; same && stage < (cluster_is_unlike(c) ? r->p : 1); stage++) {
            OrderPlaces mine = order_places(c, r, ORDERS[number], stage),
                        other = order_places(c, r, ORDERS[i], stage);
            same = placement_same(&mine.tensor, &other.tensor) &&
                   placement_same(&mine.data, &other.data) &&
                   placement_same(&mine.ends, &other.ends) && mine.forward == other.forward &&
                   mine.wrapped == other.wrapped;
        }
        if (same) return true;
    }
    return false;
}

static inline int candidate_order(const Candidate *a, const Candidate *b, double x, double y) {
    if (x != y) return x < y ? -1 : 1;
    const StepLayout *r = &a->run, *s = &b->run;
    size_t left[] = {r->t,
                     r->p,
                     r->v,
                     r->zero,
                     r->sequence_parallel,
                     r->micro_batch,
                     (size_t)a->recompute,
                     r->schedule,
                     r->shard,
                     r->replicas,
                     r->c,
                     r->e},
           right[] = {s->t,
                      s->p,
                      s->v,
                      s->zero,
                      s->sequence_parallel,
                      s->micro_batch,
                      (size_t)b->recompute,
                      s->schedule,
                      s->shard,
                      s->replicas,
                      s->c,
                      s->e};
    for (size_t i = 0; i < sizeof left / sizeof *left; i++)
        if (left[i] != right[i]) return left[i] < right[i] ? -1 : 1;
    int stages = strcmp(r->stages, s->stages);
    return stages ? stages : order_number(r->order) - order_number(s->order);
}

// True if a is faster, or as fast with smaller sizes.
static inline bool candidate_less(const Candidate *a, const Candidate *b) {
    return candidate_order(a, b, a->seconds, b->seconds) < 0;
}

static inline int candidate_compare_bounds(const void *a, const void *b) {
    const Candidate *x = (const Candidate *)a, *y = (const Candidate *)b;
    return candidate_order(x, y, x->bound, y->bound);
}

static inline void search_add(Search *s, const Candidate *x) {
    if (s->count == s->room) {
        s->room = s->room ? 2 * s->room : 1024;
        s->all = (Candidate *)host_resize(s->all, s->room, sizeof *s->all);
    }
    s->all[s->count] = *x;
    s->all[s->count++].bound = step_bound(s->cluster, &x->run, &s->memo);
}

// Tries the kinds of recomputation, ZeRO and rank order of a layout that the trainer accepts.
static inline void search_variants(Search *s, Candidate x, bool fits,
                                   const bool doubles[ORDER_COUNT]) {
    const Wish *w = &s->wish;
    // The ranks of one node are alike. Experts are exchanged among neighbours: the default's.
    bool one_node = w->ranks <= (size_t)s->cluster->gpus_per_node;
    bool one_order = one_node || w->order || x.run.E;
    for (int k = RECOMPUTE_NONE; k <= RECOMPUTE_LAYER; k++) {
        if (w->recompute >= 0 && w->recompute != k) continue;
        candidate_recompute(&x, k);
        for (int zero = 0; zero <= (x.run.d > 1); zero++) {
            if (w->zero >= 0 && w->zero != zero && x.run.d > 1) continue;
            if (x.run.e > 1 && !zero) {
                Error err;
                candidate_experts_divide(&x.run, false, &err);
                if (w->zero == 0) snprintf(s->why, sizeof s->why, "%s", err.text);
                continue;
            }
            x.run.zero = zero;
            for (int o = 0; o < (one_order ? 1 : (int)ORDER_COUNT); o++) {
                if (doubles[o]) continue;
                strcpy(x.run.order, w->order ? w->order : ORDERS[o]);
                s->listed++;
                if (fits) search_add(s, &x);
                else s->too_large++;
            }
        }
    }
}

// Tries schedules, chunks and sequence parallelism of sizes whose product is the number of ranks.
static inline void search_schedules(Search *s, Candidate x, bool fits,
                                    const bool doubles[ORDER_COUNT]) {
    const Wish *w = &s->wish;
    size_t p = x.run.p, L = w->model.L;
    Error err;
    x.run.zero = x.run.e > 1;  // without it expert ranks are refused
    for (int sp = 0; sp <= (x.run.t > 1); sp++) {
        if (w->sequence_parallel >= 0 && w->sequence_parallel != sp && x.run.t > 1) continue;
        x.run.sequence_parallel = sp;
        for (int schedule = SCHEDULE_GPIPE; schedule < SCHEDULE_COUNT; schedule++) {
            bool left_out = schedule == SCHEDULE_ZB_AUTO || (p == 1 && schedule != SCHEDULE_1F1B);
            if (w->schedule >= 0 ? w->schedule != schedule : left_out) continue;
            x.run.schedule = (Schedule)schedule;
            if (w->llama && w->schedule < 0 && step_split(&x.run)) continue;
            if (w->no_v && schedule >= SCHEDULE_ZB_V) continue;
            bool folded = step_folded(&x.run), chunks = folded || schedule == SCHEDULE_INTERLEAVED;
            size_t most = folded ? 2 : chunks ? L / p : 1;
            for (size_t v = chunks ? 2 : 1; v <= most; v++) {
                if ((w->v && w->v != v) || (chunks && L % (p * v))) continue;
                x.run.v = v;
                for (size_t times = 1;
                     times <= (schedule == SCHEDULE_ZB_AUTO ? SEARCH_IN_FLIGHT : 1); times++) {
                    x.run.max_in_flight = schedule == SCHEDULE_ZB_AUTO ? times * p : 0;
                    if (candidate_left_out(&x, &err)) {
                        if (w->schedule == schedule)
                            snprintf(s->why, sizeof s->why, "%s", err.text);
                    } else if (candidate_refused(&x, w->model.V, &err)) {
                        snprintf(s->why, sizeof s->why, "%s", err.text);
                        s->refused++;
                    } else search_variants(s, x, fits, doubles);
                }
            }
        }
    }
}

// True if the wish leaves room for FSDP, which knows none of these.
static inline bool wish_allows_shards(const Wish *w) {
    if (w->muon || (w->replicas && w->ranks % w->replicas)) return false;
    return !w->llama && w->shard != 0 && w->t <= 1 && w->p <= 1 && !w->v && w->schedule < 0 &&
           w->sequence_parallel < 1 && w->zero != 0 && w->ranks > 1;
}

static inline bool wish_allows_shard(const Wish *w, size_t shard) {
    return w->shard < 0 || w->shard == (int)shard;
}

// True if nothing but data ranks with ZeRO is asked for, on which Muon runs.
static inline bool wish_allows_muon(const Wish *w) {
    return !w->llama && w->shard <= 0 && w->t <= 1 && w->p <= 1 && !w->v && w->schedule < 0 &&
           w->sequence_parallel < 1 && w->zero != 0;
}

// Makes a layout of data ranks alone, for FSDP or Muon.
static inline void candidate_data_ranks(Candidate *x) {
    x->run.zero = true, x->run.v = 1, x->run.schedule = SCHEDULE_1F1B;
}

// Adds the layouts of FSDP with x->run.shard and x->run.replicas, or of Muon: all GPUs are data
// ranks.
static inline void search_data_ranks(Search *s, Candidate x) {
    const Wish *w = &s->wish;
    size_t share = w->global_batch / x.run.d;
    Error err;
    candidate_data_ranks(&x);
    for (x.run.micro_batch = 1;
         x.run.micro_batch <= share && x.run.micro_batch <= SEARCH_MICRO_BATCH; x.run.micro_batch++)
        for (int k = RECOMPUTE_NONE; k <= RECOMPUTE_LAYER; k++) {
            if (share % x.run.micro_batch ||
                (w->micro_batch && w->micro_batch != x.run.micro_batch) ||
                (w->recompute >= 0 && w->recompute != k))
                continue;
            candidate_recompute(&x, k);
            if (candidate_refused(&x, w->model.V, &err)) {
                snprintf(s->why, sizeof s->why, "%s", err.text);
                s->refused++;
                continue;
            }
            s->listed++;
            search_add(s, &x);
        }
}

// Adds the layouts of FSDP: sharded over all ranks, or in replicas of one node, two, four...
static inline void search_sharded(Search *s, Candidate x) {
    size_t wished = s->wish.replicas, node = (size_t)s->cluster->gpus_per_node;
    for (x.run.shard = 2; x.run.shard <= 3; x.run.shard++) {
        if (!wish_allows_shard(&s->wish, x.run.shard)) continue;
        x.run.replicas = wished ? wished : 1;
        search_data_ranks(s, x);
        for (size_t shards = node; !wished && shards < x.run.d; shards *= 2) {
            if (x.run.d % shards) continue;
            x.run.replicas = x.run.d / shards;
            search_data_ranks(s, x);
        }
    }
}

// Returns a layout of the wish without sizes.
static inline Candidate search_blank(const Search *s, size_t ranks) {
    const Wish *w = &s->wish;
    Candidate x;
    memset(&x, 0, sizeof x);
    x.run.ranks = ranks, x.run.layers = w->model.L, x.run.C = w->model.C, x.run.NH = w->model.NH;
    x.run.T = w->T, x.run.vocabulary = w->model.Vp, x.run.global_batch = w->global_batch;
    x.run.scatter_gather = s->cluster->scatter_gather;
    x.run.muon = w->muon;
    strcpy(x.run.order, w->order ? w->order : ORDERS[0]);
    const LlamaSize *llama = llama_size(x.llama = w->llama);
    const MoeSize *experts = llama_experts(x.llama);
    x.run.c = x.run.e = 1;
    if (experts) {
        x.run.E = experts->E, x.run.k = experts->k;
        x.run.capacity = w->capacity < 0 ? WISH_CAPACITY : w->capacity;
    }
    if (x.llama) {
        x.run.KV = llama->KV, x.run.F = llama->F, x.run.gate = llama->type != NEMOTRON,
        x.run.tied = llama->tied, x.run.HS = llama->HS, x.run.window = llama->window,
        x.run.head_norms = llama->type == QWEN3;
    }
    snprintf(x.run.stages, sizeof x.run.stages, "%s", w->stages ? w->stages : "");
    return x;
}

// True if t and p leave data ranks that the wish and the batch allow; their number goes into x.
static inline bool search_split(const Wish *w, Candidate *x) {
    StepLayout *r = &x->run;
    if (r->ranks % (r->t * r->p) || (w->t && w->t != r->t) || (w->p && w->p != r->p)) return false;
    r->d = r->ranks / (r->t * r->p);
    if (w->d && w->d != r->d) return false;
    return llama_experts(w->llama) || w->global_batch % r->d == 0;
}

// Return the most context and expert ranks of t p d ranks. Only train_5d has any.
static inline size_t search_most_context(const StepLayout *r) { return r->E ? r->d : 1; }
static inline size_t search_most_experts(const StepLayout *r) { return r->E ? r->E : 1; }

// True if the wish allows these context and expert ranks, and the data ranks, the sequence, the
// experts and the batch divide. Says in s->why what does not divide, if the wish names it.
static inline bool search_cut(Search *s, const StepLayout *r) {
    const Wish *w = &s->wish;
    if ((w->c && w->c != r->c) || (w->e && w->e != r->e)) return false;
    if (r->d % r->c || r->d % r->e || (r->E && r->E % r->e)) {
        Error err = {""};
        if (w->c == r->c && r->d % r->c)
            error_set(&err,
                      "--context %zu does not divide the %zu data ranks: take a size that does",
                      r->c, r->d);
        else if (w->e == r->e) candidate_experts_divide(r, true, &err);
        if (err.text[0]) snprintf(s->why, sizeof s->why, "%s", err.text);
        return false;
    }
    if (r->T % (2 * r->c) || w->global_batch % (r->d / r->c)) return false;
    return w->c || r->c == 1 || r->T / r->c >= SEARCH_TOKENS;
}

// Counts a layout's memory, keeps the smallest one in s->smallest. True if it fits.
static inline bool search_fits_one(Search *s, Candidate *x) {
    candidate_memory(x, s->wish.model.V, (size_t)s->cluster->reserve, true);
    if (!s->smallest.memory || x->memory < s->smallest.memory) s->smallest = *x;
    return (double)x->memory <= s->cluster->memory;
}

// True if a layout of FSDP fits: one of the least micro-batch.
static inline bool search_fits_sharded(Search *s, Candidate x) {
    const Wish *w = &s->wish;
    Error err;
    if (x.run.t * x.run.p > 1 || !wish_allows_shards(w)) return false;
    x.run.micro_batch = w->micro_batch ? w->micro_batch : 1;
    candidate_data_ranks(&x);
    x.run.replicas = w->replicas ? w->replicas : 1;
    for (x.run.shard = 3; x.run.shard >= 2; x.run.shard--)
        for (x.recompute = RECOMPUTE_LAYER; x.recompute >= RECOMPUTE_NONE; x.recompute--)
            if (wish_allows_shard(w, x.run.shard) &&
                (w->recompute < 0 || w->recompute == x.recompute) &&
                x.run.global_batch / x.run.d % x.run.micro_batch == 0 &&
                !candidate_refused(&x, w->model.V, &err) && search_fits_one(s, &x))
                return true;
    return false;
}

// True if a layout of these sizes and this schedule fits, in one of the ways to recompute and to
// shard.
static inline bool search_fits_schedule(Search *s, Candidate x, Schedule schedule) {
    const Wish *w = &s->wish;
    StepLayout *r = &x.run;
    Error err;
    r->schedule = schedule;
    r->max_in_flight = schedule == SCHEDULE_ZB_AUTO ? r->p : 0;
    for (int sp = r->t > 1; sp >= 0; sp--)
        for (x.recompute = RECOMPUTE_LAYER; x.recompute >= RECOMPUTE_NONE; x.recompute--)
            for (int zero = r->d > 1; zero >= (r->e > 1); zero--)
                for (r->v = w->v                               ? w->v
                            : schedule == SCHEDULE_INTERLEAVED ? 2
                                                               : 1 + step_folded(r);
                     r->v <= r->layers; r->v++) {
                    bool wished =
                        (w->sequence_parallel < 0 || w->sequence_parallel == sp || r->t == 1) &&
                        (w->recompute < 0 || w->recompute == x.recompute) &&
                        (w->zero < 0 || w->zero == zero || r->d == 1);
                    if ((w->v || schedule != SCHEDULE_INTERLEAVED) && !wished) break;
                    r->sequence_parallel = sp, r->zero = zero;
                    if (wished &&
                        (r->v == 1 || r->layers % (r->p * r->v) == 0) &&
                        !candidate_left_out(&x, &err) &&
                        !candidate_refused(&x, w->model.V, &err) && search_fits_one(s, &x))
                        return true;
                    if (w->v || schedule != SCHEDULE_INTERLEAVED) break;
                }
    return false;
}

// True if a layout of these t, p and d fits, one that needs as little memory as any. It has the
// least micro-batch and 1F1B. If layers are not recomputed, v-half may need less.
static inline bool search_fits_grid(Search *s, Candidate x) {
    const Wish *w = &s->wish;
    StepLayout *r = &x.run;
    if (w->shard != 0 && w->shard != -1) return false;
    // Weights and gradients are not sharded over data ranks, the optimizer's 12 bytes may be.
    double parameters = step_matrices(r) * (double)(w->model.L * w->model.C) * (double)w->model.C;
    double experts = (double)(w->model.L * r->E) * step_expert(r), e = (double)r->e;
    double states = parameters * (6 / (double)(r->t * r->p) + 12 / (double)r->ranks) +
                    experts * (6 / (e * (double)(r->t * r->p)) + 12 / (double)r->ranks);
    if (states > s->cluster->memory && s->smallest.memory && states > (double)s->smallest.memory)
        return false;
    r->micro_batch = w->micro_batch ? w->micro_batch : 1;
    if (step_share(r) % r->micro_batch) return false;
    bool keeps = w->recompute == RECOMPUTE_NONE || w->recompute == RECOMPUTE_GELU;
    bool half = w->schedule < 0 && !w->llama && !w->no_v && keeps && (!w->v || w->v == 2);
    Schedule first = w->schedule >= 0 ? (Schedule)w->schedule
                     : w->v > 1       ? SCHEDULE_INTERLEAVED
                                      : SCHEDULE_1F1B;
    return search_fits_schedule(s, x, first) ||
           (half && search_fits_schedule(s, x, SCHEDULE_V_HALF));
}

// True if a layout of Muon fits: one of the least micro-batch. Weights and gradients take 6 bytes
// on each rank, the optimizer 8 on all together.
static inline bool search_fits_muon(Search *s, Candidate x) {
    const Wish *w = &s->wish;
    Error err;
    double parameters = step_matrices(&x.run) * (double)(w->model.L * w->model.C) *
                        (double)w->model.C;
    if (x.run.t * x.run.p > 1) return false;
    if (s->smallest.memory && parameters * (6 + 8 / (double)x.run.d) > s->cluster->memory)
        return false;
    x.run.micro_batch = w->micro_batch ? w->micro_batch : 1;
    if (x.run.global_batch / x.run.d % x.run.micro_batch) return false;
    candidate_data_ranks(&x);
    for (x.recompute = RECOMPUTE_LAYER; x.recompute >= RECOMPUTE_NONE; x.recompute--)
        if ((w->recompute < 0 || w->recompute == x.recompute) &&
            !candidate_refused(&x, w->model.V, &err) && search_fits_one(s, &x))
            return true;
    return false;
}

static inline bool search_fits(Search *s, Candidate x) {
    if (s->wish.muon) return search_fits_muon(s, x);
    for (x.run.c = 1; x.run.c <= search_most_context(&x.run); x.run.c++)
        for (x.run.e = 1; x.run.e <= search_most_experts(&x.run); x.run.e++)
            if (search_cut(s, &x.run) && search_fits_grid(s, x)) return true;
    x.run.c = x.run.e = 1;
    return search_fits_sharded(s, x);
}

// Returns the smallest number of GPUs on which the wish fits, or 0 if there is none up to
// SEARCH_GPUS.
static inline size_t search_smallest(const Search *asked) {
    Search s = *asked;
    const Wish *w = &s.wish;
    Candidate blank = search_blank(&s, 1);
    double parameters = step_matrices(&blank.run) * (double)(w->model.L * w->model.C) *
                            (double)w->model.C +
                        (double)(w->model.L * blank.run.E) * step_expert(&blank.run);
    size_t least = (size_t)((w->muon ? 14 : 18) * parameters / s.cluster->memory);
    size_t heads = w->muon ? 1 : w->model.NH, layers = w->muon ? 1 : w->model.L;
    for (size_t n = least ? least : 1; n <= SEARCH_GPUS; n++) {
        Candidate x = search_blank(&s, n);
        for (x.run.t = 1; x.run.t <= n && x.run.t <= heads; x.run.t++)
            for (x.run.p = 1; x.run.p * x.run.t <= n && x.run.p <= layers; x.run.p++)
                if (search_split(w, &x) && search_fits(&s, x)) return n;
    }
    return 0;
}

// Adds the layouts of t, p, d, c and e.
static inline void search_grid(Search *s, Candidate x) {
    const Wish *w = &s->wish;
    bool fits = search_fits_grid(s, x), doubles[ORDER_COUNT] = {false};
    for (int i = 0; i < ORDER_COUNT; i++)
        doubles[i] = !w->order && order_is_double(s->cluster, &x.run, i);
    size_t share = step_share(&x.run);
    for (size_t b = 1; b <= share && b <= SEARCH_MICRO_BATCH; b++) {
        if (share % b || (w->micro_batch && w->micro_batch != b)) continue;
        x.run.micro_batch = b;
        search_schedules(s, x, fits, doubles);
    }
}

static inline void search_enumerate(Search *s) {
    const Wish *w = &s->wish;
    Candidate x = search_blank(s, w->ranks);
    for (x.run.t = 1; x.run.t <= w->ranks && x.run.t <= w->model.NH; x.run.t++)
        for (x.run.p = 1; x.run.p * x.run.t <= w->ranks && x.run.p <= w->model.L; x.run.p++) {
            if (!search_split(w, &x)) continue;
            if (x.run.t * x.run.p == 1 && wish_allows_shards(w)) search_sharded(s, x);
            if (x.run.t * x.run.p == 1 && w->muon) search_data_ranks(s, x);
            if (w->muon || (w->shard != 0 && w->shard != -1)) continue;
            for (x.run.c = 1; x.run.c <= search_most_context(&x.run); x.run.c++)
                for (x.run.e = 1; x.run.e <= search_most_experts(&x.run); x.run.e++)
                    if (search_cut(s, &x.run)) search_grid(s, x);
            x.run.c = x.run.e = 1;
        }
}

static inline double search_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// True if two layouts of equal time are one to a reader: only the order, the schedule's name or
// its limit differ.
static inline bool candidate_same(const Candidate *a, const Candidate *b) {
    const StepLayout *r = &a->run, *q = &b->run;
    return a->seconds == b->seconds && r->t == q->t && r->p == q->p && r->d == q->d &&
           r->v == q->v && r->micro_batch == q->micro_batch &&
           r->sequence_parallel == q->sequence_parallel && r->zero == q->zero &&
           r->shard == q->shard && r->replicas == q->replicas && a->recompute == b->recompute &&
           r->c == q->c && r->e == q->e &&
           strcmp(r->stages, q->stages) == 0;
}

// Puts a simulated layout among the best, if it is one of them and none of them is the same.
static inline void search_keep(Search *s, const Candidate *x) {
    size_t at = s->found;
    for (size_t i = 0; i < s->found; i++)
        if (candidate_same(x, &s->best[i])) return;
    while (at > 0 && candidate_less(x, &s->best[at - 1])) at--;
    if (at == SEARCH_BEST) return;
    if (s->found < SEARCH_BEST) s->found++;
    memmove(&s->best[at + 1], &s->best[at], (s->found - 1 - at) * sizeof *x);
    s->best[at] = *x;
}

// Returns the seconds that a layout must beat to be among the best.
static inline double search_limit(const Search *s) {
    return s->found == SEARCH_BEST ? s->best[SEARCH_BEST - 1].seconds : INFINITY;
}

// Asks a layout for its memory and, if it fits, for its time.
static inline bool search_try(Search *s, Candidate *x) {
    StepTime time;
    Error err;
    candidate_memory(x, s->wish.model.V, (size_t)s->cluster->reserve, false);
    if ((double)x->memory <= s->cluster->memory)
        candidate_memory(x, s->wish.model.V, (size_t)s->cluster->reserve, true);
    if ((double)x->memory > s->cluster->memory) {
        if (!s->too_large++ || x->memory < s->smallest.memory) s->smallest = *x;
        return false;
    }
    if (!step_simulate(s->cluster, &x->run, &time, &err)) return false;
    s->simulated++;
    x->seconds = time.seconds;
    search_keep(s, x);
    return true;
}

// Prints one line on a terminal: the numbers of layouts done and still open, and the time left.
static inline void search_report(const Search *s, size_t at, double began, double *last) {
    double now = search_seconds();
    if (!s->progress || now - *last < 0.25) return;
    *last = now;
    size_t end = at;
    while (end < s->count && s->all[end].bound <= search_limit(s)) end++;
    // Known once there are as many as are reported: then a bound ends the search.
    char left[64] = "";
    if (at && s->found == SEARCH_BEST)
        snprintf(left, sizeof left, ", best %.3f s, at most %.0f s left", s->best[0].seconds,
                 (now - began) / (double)at * (double)(end - at));
    fprintf(stderr, "\r%zu of %zu layouts, %zu simulated%s \033[K", at, s->count, s->simulated,
            left);
}

// Schedules found by a search take too long to make for every layout: the best ones are tried
// with these as well.
static inline void search_zero_bubble(Search *s) {
    Candidate before[SEARCH_BEST];
    size_t count = s->found;
    memcpy(before, s->best, sizeof before);
    for (size_t i = 0; i < count && s->wish.schedule < 0 && !s->wish.v && !s->wish.llama; i++) {
        Candidate x = before[i];
        bool seen = false;  // as another schedule of the same sizes
        for (size_t j = 0; j < i; j++) {
            const StepLayout *a = &before[j].run, *b = &x.run;
            seen = seen || (a->t == b->t && a->p == b->p && a->micro_batch == b->micro_batch &&
                            a->zero == b->zero && a->sequence_parallel == b->sequence_parallel &&
                            a->recompute == b->recompute && strcmp(a->order, b->order) == 0);
        }
        if (x.run.p == 1 || seen) continue;
        x.run.v = 1, x.run.schedule = SCHEDULE_ZB_AUTO;
        for (size_t times = 1; times <= SEARCH_IN_FLIGHT; times++) {
            Error err;
            x.run.max_in_flight = times * x.run.p;
            if (!candidate_refused(&x, s->wish.model.V, &err)) search_try(s, &x);
        }
    }
}

// Returns the layout with one layer moved from a stage to another.
static inline Candidate candidate_moved(const Candidate *x, size_t from, size_t to) {
    Candidate y = *x;
    int n = 0;
    for (size_t stage = 0; stage < x->run.p; stage++) {
        size_t layers = 0;
        for (size_t chunk = 0; chunk < x->run.v; chunk++)
            layers += step_chunk_layers(&x->run, step_chunk(&x->run, stage, chunk));
        n += snprintf(y.run.stages + n, sizeof y.run.stages - (size_t)n, "%s%zu", stage ? "," : "",
                      layers - (stage == from) + (stage == to));
    }
    return y;
}

// Moves layers away from the stage that is busiest, in the best layouts, as long as the step
// becomes shorter. Stages on unlike nodes take unlike times for the same layers, most of all for
// their gradients.
static inline void search_stages(Search *s) {
    Candidate before[SEARCH_BEST];
    size_t count = cluster_is_unlike(s->cluster) && !s->wish.stages ? s->found : 0;
    Error err;
    memcpy(before, s->best, sizeof before);
    for (size_t i = 0; i < count; i++) {
        Candidate x = before[i], next = x;
        StepTime now, time;
        if (x.run.p == 1 || x.run.p > SEARCH_STAGES) continue;
        for (bool better = true; better; x = next) {
            better = false;
            if (!step_simulate(s->cluster, &x.run, &now, &err)) break;
            for (size_t to = 0; to < x.run.p; to++) {
                Candidate y = candidate_moved(&x, now.slowest, to);
                if (to == now.slowest || candidate_refused(&y, s->wish.model.V, &err) ||
                    !step_simulate(s->cluster, &y.run, &time, &err) ||
                    time.seconds >= next.seconds)
                    continue;
                next = y, next.seconds = time.seconds;
                better = true;
            }
        }
        if (x.run.stages[0]) search_try(s, &x);
    }
}

// Fills s->best from s->wish and s->cluster.
static inline void search_layouts(Search *s) {
    double began = search_seconds(), last = began;
    s->memo.size = SEARCH_PIECES;
    s->memo.piece = (StepPieces *)host_alloc(s->memo.size, sizeof *s->memo.piece);
    search_enumerate(s);
    qsort(s->all, s->count, sizeof *s->all, candidate_compare_bounds);
    for (size_t i = 0; i < s->count; i++) {
        if (s->all[i].bound > search_limit(s)) {
            s->beaten = s->count - i;
            break;
        }
        search_try(s, &s->all[i]);
        search_report(s, i + 1, began, &last);
    }
    if (s->progress) fprintf(stderr, "\r\033[K");
    search_zero_bubble(s);
    search_stages(s);
}

static inline void search_free(Search *s) {
    free(s->all), free(s->memo.piece);
    memset(s, 0, sizeof *s);
}

#endif
