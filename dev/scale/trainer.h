// trainer.h: has a trainer simulate the step of a published run, with the trainers' own software:
//   train_fsdp    a run under FSDP
//   train_llama   a run with grouped heads, which is a Nemotron-4
//   train_gpt_3d  any other run
//
// defines: trainer_can, trainer_software, trainer_seconds
#ifndef DEV_SCALE_TRAINER_H
#define DEV_SCALE_TRAINER_H

#include "dev/scale/step.h"

// True if a trainer can run the layout. They deal layers evenly to the stages, never recompute
// attention alone, and always scatter messages.
static inline bool trainer_can(const StepLayout *r) {
    bool scatters = r->scatter_gather || r->t == 1 || r->p == 1;
    return !r->short_ends && r->recompute != LAYER_ATTENTION && scatters;
}

// Returns the cluster with the trainers' software where the light simulation knows other software
// too.
static inline Cluster trainer_software(const Cluster *cluster) {
    Cluster c = *cluster;
    c.fused_forward = c.fused_backward = c.scatter_gather = c.gather_early = true;
    c.recompute_end = c.attention_recompute = false;
    c.gradient_bytes = 4, c.host_layer = 0;
    return c;
}

// Stores the seconds of the run's step on the cluster of the file. With overlap, gradients are
// summed over the data ranks beside the last backward, and sharded weights gathered beside the
// first forward. The first step has none to gather, so that the second one counts. False, with
// the trainer's message, if it refused.
static inline bool trainer_seconds(const char *folder, const char *cluster, const StepLayout *r,
                                   bool overlap, double *seconds, Error *err) {
    static const char *const recompute[] = {"none", "gelu", "none", "layer"};  // by LayerRecompute
    char command[4096], layout[512], line[1024], model[64] = "", said[200] = "it said nothing";
    if (r->KV) snprintf(model, sizeof model, "--model nemotron --kv-heads %zu", r->KV);
    if (r->shard) snprintf(layout, sizeof layout, "--shard %zu", r->shard);
    else
        snprintf(layout, sizeof layout,
                 "--tensor %zu --pipeline %zu --data %zu --virtual %zu --sequence-parallel %d "
                 "--zero %d%s%s",
                 r->t, r->p, r->d, r->v, r->sequence_parallel, r->zero,
                 r->stages[0] ? " --layers-per-stage " : "", r->stages);
    snprintf(
        command, sizeof command,
        "'%s/%s' %s --simulate '%s' --ranks %zu --layers %zu --heads %zu --channels %zu --seq "
        "%zu --vocab %zu "
        "--micro-batch %zu --global-batch %zu %s --recompute %s --overlap %d --steps %d 2>&1",
        folder,
        r->shard ? "train_fsdp"
        : r->KV  ? "train_llama"
                 : "train_gpt_3d",
        model, cluster, r->ranks, r->layers, r->NH, r->C, r->T, r->vocabulary, r->micro_batch,
        r->global_batch, layout, recompute[r->recompute], overlap, r->zero && overlap ? 2 : 1);
    if (strchr(folder, '\'') || strchr(cluster, '\''))
        return error_set(err, "%s has a ' in its name, which a shell would take for an end",
                         cluster);
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
