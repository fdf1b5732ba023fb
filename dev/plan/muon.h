// muon.h: the memory of a rank under Muon, as train_muon.cu counts it. The data ranks own unlike
// matrices, so that one of them is the fullest.
//
// defines: candidate_muon
#ifndef DEV_PLAN_MUON_H
#define DEV_PLAN_MUON_H

#include "dev/plan/memory.h"

// Returns the data rank that Muon's deal gives most elements.
static inline size_t muon_fullest(const MuonBlock *blocks, size_t count, size_t d) {
    size_t *elements = (size_t *)host_alloc(d, sizeof *elements), most = 0;
    for (size_t i = 0; i < count; i++)
        elements[blocks[i].owner] += blocks[i].hi - blocks[i].lo;
    for (size_t rank = 1; rank < d; rank++)
        if (elements[rank] > elements[most]) most = rank;
    free(elements);
    return most;
}

// Returns the arenas of a data rank under Muon, and the fullest rank: they own unlike matrices.
static inline StageMemory candidate_owner(const Candidate *x, size_t vocabulary, size_t rank,
                                          size_t *fullest) {
    const StepLayout *r = &x->run;
    muon::GPT model, *m = &model;
    memset(m, 0, sizeof *m);
    muon_spec(&m->spec);
    m->opt = candidate_options(x, vocabulary);
    m->config = m->opt.config, m->grid = m->opt.grid;
    m->config.spec = &m->spec.model;
    Error err;
    if (!grid_make(&m->grid, r->ranks, (int)rank, m->opt.order, &err))
        abort();  // candidate_refused asked
    m->B = r->micro_batch, m->T = r->T, m->micros = r->global_batch / (r->micro_batch * r->d);
    m->sp = 1;
    trainer_sizes(m, 1);
    muon::shard(m);
    muon::layout(m);
    *fullest = muon_fullest(m->blocks, r->layers * LAYER_MATRICES, r->d);
    StageMemory used = {m->weights.used, m->gradients.used, m->optimizer.used, m->activations.used};
    free(m->acts.layers), free(m->acts.residual), free(m->blocks), free(m->w), free(m->dw);
    free(m->share.host_pieces), free(m->state.host_pieces);
    table_free(&m->table);
    return used;
}

static StageMemory candidate_muon(const Candidate *x, size_t vocabulary) {
    size_t fullest;
    StageMemory first = candidate_owner(x, vocabulary, 0, &fullest);
    return fullest == 0 ? first : candidate_owner(x, vocabulary, fullest, &fullest);
}

#endif
