// trainer.h: has train_gpt_3d simulate the step of a published run.
//
// defines: trainer_can, trainer_seconds
#ifndef DEV_SCALE_TRAINER_H
#define DEV_SCALE_TRAINER_H

#include "dev/scale/step.h"

#include <unistd.h>

// The trainer recomputes whole layers or nothing, always scatters what goes between stages, and deals layers evenly.
static inline bool trainer_can(const Layout *r) {
    return (r->recompute == LAYER_WHOLE || r->recompute == LAYER_KEEPS) && r->scatter_gather && !r->short_ends;
}

// The step of the run on the cluster of the file, in seconds; gradients are summed over the data ranks after the last
// backward, as in the published runs, and every rank updates all of its weights. False, with what the trainer said, if
// it refused.
static inline bool trainer_seconds(const char *program, const char *cluster, const Layout *r, double *seconds,
                                   Error *err) {
    char command[4096], line[1024], said[200] = "it said nothing";
    snprintf(command, sizeof command,
             "'%s' --simulate '%s' --ranks %zu --layers %zu --heads %zu --channels %zu --seq %zu --vocab %zu "
             "--micro-batch %zu --global-batch %zu --tensor %zu --pipeline %zu --data %zu --virtual %zu --recompute %s "
             "--sequence-parallel %d --zero 0 --overlap 0 --steps 1 2>&1",
             program, cluster, r->ranks, r->layers, r->NH, r->C, r->T, r->vocabulary, r->micro_batch, r->global_batch,
             r->t, r->p, r->d, r->v, r->recompute == LAYER_WHOLE ? "layer" : "none", r->sequence_parallel);
    FILE *out = popen(command, "r");
    bool found = false;
    while (out && fgets(line, sizeof line, out)) {
        if (sscanf(line, "step %lf s |", seconds) == 1) found = true;
        line[strcspn(line, "\n")] = 0;
        if (strncmp(line, "error: ", 7) == 0) snprintf(said, sizeof said, "%.199s", line + 7);
    }
    int status = out ? pclose(out) : -1;
    return (found && status == 0) || error_set(err, "%s", said);
}

#endif
