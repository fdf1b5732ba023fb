// pipeline_pairs.h: times of dualpipe-v as DeepSeek counts them. A forward and the backward that
// follows it in the other chunk overlap, and take the time of a pair together.
//
// defines: pairs_walk
#ifndef DEV_PLOT_PIPELINE_PAIRS_H
#define DEV_PLOT_PIPELINE_PAIRS_H

#include "llmc/v_schedules.h"

// True if step i of a list begins a pair: a forward, then both halves of a backward of the other
// chunk. DualPipeV's first pair of the last stage does not overlap: its backward could not begin
// before its forward ends.
static inline bool pairs_begins(const PipelineLists *l, int stage, size_t i) {
    const PipelineStep *s = &l->steps[stage][i];
    if (i + 2 >= l->counts[stage] || s[0].kind != STEP_FORWARD || s[1].kind != STEP_BACKWARD)
        return false;
    bool whole = s[2].kind == STEP_WEIGHT && s[2].micro == s[1].micro && s[2].chunk == s[1].chunk;
    bool first = s[1].micro == 0 && s[1].chunk == 1 && stage == l->p - 1;
    return whole && s[0].chunk != s[1].chunk && !first;
}

// Runs proved lists in a V with unlimited buffers. times: of a chunk's steps; pair: of an
// overlapped forward and backward. Sets end and busy of *run.
static inline void pairs_walk(const PipelineLists *l, const PipelineTimes *times, double pair,
                              PipelineRun *run) {
    int p = l->p;
    size_t inputs = 2 * (size_t)p * l->m;
    double *ready[2] = {(double *)host_alloc(2 * inputs, sizeof(double)), NULL};
    double *clock = (double *)host_alloc((size_t)p, sizeof *clock);
    size_t *next = (size_t *)host_alloc((size_t)p, sizeof *next);
    ready[1] = ready[0] + inputs;
    for (size_t i = 0; i < 2 * inputs; i++) ready[0][i] = INFINITY;
    for (int i = 0; i < l->m; i++) ready[STEP_FORWARD][i] = 0;
    run->end = run->busy = run->longest = 0;
    for (bool moved = true; moved;) {
        moved = false;
        for (int s = 0; s < p; s++) {
            while (next[s] < l->counts[s]) {
                const PipelineStep *step = &l->steps[s][next[s]];
                bool both = pairs_begins(l, s, next[s]);
                double start = clock[s], took = both ? pair : times->step[step->kind];
                for (int k = 0; k <= both; k++) {
                    size_t chunk = (size_t)pipeline_chunk(l, s, step[k].chunk);
                    if (step[k].kind != STEP_WEIGHT)
                        start = fmax(start, ready[step[k].kind][chunk * l->m + step[k].micro]);
                }
                if (isinf(start)) break;
                clock[s] = start + took;
                run->busy += took;
                for (int k = 0; k <= both; k++) {
                    if (step[k].kind == STEP_WEIGHT) continue;
                    int up = step[k].kind == STEP_FORWARD ? 1 : -1, kind = (int)step[k].kind;
                    int to = pipeline_chunk(l, s, step[k].chunk) + up;
                    if (to < 0) continue;
                    if (to == 2 * p) {  // the loss
                        to--;
                        kind = STEP_BACKWARD;
                    }
                    bool here = (int)chunk_stage((size_t)p, true, (size_t)to) == s;
                    ready[kind][(size_t)to * l->m + step[k].micro] =
                        clock[s] + (here ? 0 : times->transfer);
                }
                next[s] += both ? 3 : 1;
                moved = true;
            }
        }
    }
    for (int s = 0; s < p; s++) {
        bool ended = next[s] == l->counts[s];
        run->end = fmax(run->end, ended ? clock[s] : INFINITY);
    }
    free(ready[0]);
    free(clock);
    free(next);
}

#endif
