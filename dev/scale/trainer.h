// trainer.h: has train_gpt_3d simulate the step of a published run.
//
// defines: trainer_can, trainer_cluster, trainer_seconds
#ifndef DEV_SCALE_TRAINER_H
#define DEV_SCALE_TRAINER_H

#include "dev/scale/step.h"
#include "dev/scale/temporary.h"

#include <unistd.h>

// The trainer deals layers evenly to the stages.
static inline bool trainer_can(const Layout *r) { return !r->short_ends; }

// Writes the cluster file for a run of which not all can be said in flags: that attention alone is computed again, and
// that messages between stages are whole, is said of the software.
static inline bool trainer_cluster(const char *cluster, const Layout *r, FILE *out, Error *err) {
    cJSON *root = json_read(cluster, CLUSTER_FILE_MAX, err);
    if (!root) return false;
    cJSON *software = cJSON_GetObjectItem(root, "software"), *attention = cJSON_CreateObject();
    cJSON_AddBoolToObject(attention, "value", r->recompute == LAYER_ATTENTION);
    cJSON_AddStringToObject(attention, "source", "the run's");
    cJSON_DeleteItemFromObject(software, "attention_recompute");
    cJSON_AddItemToObject(software, "attention_recompute", attention);
    cJSON *scatter = cJSON_GetObjectItem(software, "scatter_gather");
    if (!r->scatter_gather) cJSON_ReplaceItemInObject(scatter, "value", cJSON_CreateFalse());
    char *text = cJSON_PrintUnformatted(root);
    bool ok = fputs(text, out) != EOF && fflush(out) == 0;
    cJSON_free(text);
    cJSON_Delete(root);
    return ok || error_set(err, "cannot write a cluster file: %s", strerror(errno));
}

// The step of the run on the cluster of the file, in seconds. overlap: gradients are summed over the data ranks beside
// the last backward, not after it. Sharded weights are gathered beside the first forward then, which the first step has
// no need of: the second one counts. False, with what the trainer said, if it refused.
static inline bool trainer_seconds(const char *program, const char *cluster, const Layout *r, bool overlap,
                                   double *seconds, Error *err) {
    static const char *const recompute[] = {"none", "gelu", "none", "layer"};  // by Recompute
    char command[4096], line[1024], said[200] = "it said nothing", file[TEMPORARY_PATH];
    int descriptor = temporary_file(file, "scale", err);
    if (descriptor < 0) return false;
    FILE *changed = fdopen(descriptor, "w");
    if (!changed) return error_set(err, "cannot write %s: %s", file, strerror(errno));
    bool written = trainer_cluster(cluster, r, changed, err);
    fclose(changed);
    snprintf(command, sizeof command,
             "'%s' --simulate '%s' --ranks %zu --layers %zu --heads %zu --channels %zu --seq %zu --vocab %zu "
             "--micro-batch %zu --global-batch %zu --tensor %zu --pipeline %zu --data %zu --virtual %zu --recompute %s "
             "--sequence-parallel %d --zero %d --overlap %d --steps %d 2>&1",
             program, file, r->ranks, r->layers, r->NH, r->C, r->T, r->vocabulary, r->micro_batch, r->global_batch,
             r->t, r->p, r->d, r->v, recompute[r->recompute], r->sequence_parallel, r->zero, overlap,
             r->zero && overlap ? 2 : 1);
    FILE *out = written ? popen(command, "r") : NULL;
    bool found = false;
    while (out && fgets(line, sizeof line, out)) {
        if (sscanf(line, "step %lf s |", seconds) == 1) found = true;
        line[strcspn(line, "\n")] = 0;
        if (strncmp(line, "error: ", 7) == 0) snprintf(said, sizeof said, "%.199s", line + 7);
    }
    int status = out ? pclose(out) : -1;
    unlink(file);
    if (!written) return false;
    return (found && status == 0) || error_set(err, "%s", said);
}

#endif
