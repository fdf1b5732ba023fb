// checkpoint_list.h: the checkpoints under --out: the writer's lock, the newest,
// which ones go.
//
// defines: checkpoint_claim, checkpoint_next_save, checkpoint_prune, checkpoint_pass_over,
//          checkpoint_latest
#ifndef LLMC_CHECKPOINT_LIST_H
#define LLMC_CHECKPOINT_LIST_H

#include "llmc/host/checkpoint.h"

typedef struct {
    char path[PATH_MAX];
    size_t step;
    size_t save;  // of trainer.json, which orders them; SIZE_MAX: it cannot be read
} CheckpointEntry;

// Orders equal counts by step.
static inline int checkpoint_compare(const void *a, const void *b) {
    const CheckpointEntry *x = (const CheckpointEntry *)a, *y = (const CheckpointEntry *)b;
    if (x->save != y->save) return x->save < y->save ? -1 : 1;
    return x->step < y->step ? -1 : x->step > y->step;
}

// True for a name that we give: step-00000100 or, unfinished, tmp-00000100-HOST-PID (with
// .old, see folder_replace).
static inline bool checkpoint_parse_name(const char *name, bool unfinished, size_t *step) {
    char prefix[40];
    *step = (size_t)strtoull(name + strcspn(name, "0123456789"), NULL, 10);
    int n =
        snprintf(prefix, sizeof prefix, unfinished ? "tmp-%08zu-" : "step-%08zu", *step);
    if (strncmp(name, prefix, (size_t)n) != 0) return false;
    if (!unfinished) return name[n] == '\0';
    const char *pid = strrchr(name, '-') + 1, *end = pid + strspn(pid, "0123456789");
    return end > pid && (*end == '\0' || strcmp(end, ".old") == 0);
}

// Lists the checkpoints in a folder, the one that was saved last at the end. unfinished:
// lists saves instead that still run or were interrupted. Leaves out all entries that are
// not ours. Returns their number; free(*list).
static inline size_t checkpoint_list(const char *out_dir, bool unfinished,
                                     CheckpointEntry **list) {
    size_t count = 0;
    DIR *dir = opendir(out_dir);
    *list = NULL;
    for (struct dirent *e; dir && (e = readdir(dir)) != NULL;) {
        CheckpointEntry x = {"", 0, 0};
        char file[PATH_MAX];
        TrainerState state;
        Error ignored;
        if (!checkpoint_parse_name(e->d_name, unfinished, &x.step) ||
            !path_print(x.path, &ignored, "%s/%s", out_dir, e->d_name))
            continue;
        if (!unfinished) {
            if (!path_print(file, &ignored, "%s/trainer.json", x.path) ||
                access(file, F_OK))
                continue;
            x.save = trainer_state_read(x.path, &state, &ignored) ? state.save : SIZE_MAX;
        }
        *list = (CheckpointEntry *)host_resize(*list, count + 1, sizeof x);
        (*list)[count++] = x;
    }
    if (dir) closedir(dir);
    if (count) qsort(*list, count, sizeof(CheckpointEntry), checkpoint_compare);
    return count;
}

// Returns the count of the next save: one more than `last` and than any in the folder. A
// trainer.json edited by hand may hold the largest count: then it stays, and the step
// decides between equal counts.
static inline size_t checkpoint_next_save(const char *out_dir, size_t last) {
    CheckpointEntry *list;
    for (size_t i = checkpoint_list(out_dir, false, &list); i-- > 0;)
        if (list[i].save != SIZE_MAX && list[i].save > last) last = list[i].save;
    free(list);
    return last < TRAINER_MOST_SAVES ? last + 1 : last;
}

// Removes all checkpoints up to `step` (the one just saved) but the `keep` that were saved
// last; 0 keeps all. Never removes a checkpoint of a later step, which an earlier run left,
// nor one that cannot be read or has files that are not ours.
static inline void checkpoint_prune(const char *out_dir, size_t keep, size_t step) {
    if (keep == 0) return;
    char tmp[PATH_MAX];
    Error ignored;
    CheckpointEntry *list;
    size_t kept = 1;
    for (size_t i = checkpoint_list(out_dir, false, &list); i-- > 0;) {
        const CheckpointEntry *x = &list[i];
        if (x->save == SIZE_MAX || x->step >= step || ++kept <= keep) continue;
        // Renamed first: an interrupted removal must not leave half a checkpoint under a
        // good name.
        if (!checkpoint_is_ours(x->path, x->step) ||
            !checkpoint_tmp_path(tmp, out_dir, x->step, &ignored))
            continue;
        if (rename(x->path, tmp) == 0)
            checkpoint_remove(tmp);
        else if (errno == EXDEV)
            checkpoint_remove(x->path);  // see folder_replace
    }
    free(list);
}

// Clears away the folders that interrupted saves have left. A checkpoint that lacked only
// its name gets it; the others are removed. If its name is taken by one that was not saved
// later, it stays. Call it only under the lock: else another run may be saving.
static inline void checkpoint_clean(const char *out_dir) {
    char named[PATH_MAX];
    Error err;
    TrainerState state;
    CheckpointEntry *list;
    for (size_t i = checkpoint_list(out_dir, true, &list); i-- > 0;) {
        const CheckpointEntry *x = &list[i];
        if (!path_print(named, &err, "%s/step-%08zu", out_dir, x->step)) continue;
        if (checkpoint_is_ours(x->path, x->step) &&
            trainer_state_read(x->path, &state, &err)) {
            size_t save = state.save;
            bool later = trainer_state_read(named, &state, &err) && state.save >= save;
            if (!later && !checkpoint_give_name(x->path, named, x->step, &err))
                printf("note: %s\n", err.text);
            if (!later) continue;
        }
        if (checkpoint_looks_ours(x->path))
            checkpoint_remove(x->path);
        else
            rmdir(x->path);  // interrupted before the first file, or somebody's
    }
    free(list);
}

// Checks --out before any work: makes the folder and proves that checkpoints can be written
// there. The first rank also locks it for this run until the process ends. *lock: see
// folder_lock; -1 on other ranks.
static inline bool checkpoint_claim(const char *out_dir, bool first_rank, int *lock,
                                    Error *err) {
    char path[PATH_MAX], file[PATH_MAX];
    *lock = -1;
    if (!folder_make(out_dir, err) || (first_rank && !folder_lock(out_dir, lock, err)))
        return false;
    if (*lock >= 0)
        checkpoint_clean(out_dir);
    else if (first_rank)
        printf("note: %s; unfinished saves tmp-* stay there\n", err->text);
    // The longest path of a save must fit. The folder has a name that the next run would
    // clear away.
    if (!checkpoint_tmp_path(path, out_dir, (size_t)1e15, err) ||
        !path_print(file, err, "%s/optimizer.safetensors.index.json", path))
        return false;
    if (mkdir(path, 0777) != 0)
        return error_set(err, "cannot write to %s: %s", out_dir, strerror(errno));
    rmdir(path);
    return true;
}

// Says that a damaged checkpoint is skipped, after `passed` others. err keeps the first
// one's error.
static inline void checkpoint_pass_over(const char *path, size_t passed, const Error *why,
                                        Error *err) {
    const char *name = strrchr(path, '/') + 1;
    printf("note: the checkpoint %s is passed over: %s\n", name, why->text);
    if (passed == 0)
        error_set(err, "no checkpoint under %.*s is sound: %s", (int)(name - 1 - path),
                  path, why->text);
}

// Finds the checkpoint under out_dir that was saved last, without the newest `passed`,
// which are damaged. path is empty if there is none. False: all are damaged, or we may not
// read them.
static inline bool checkpoint_latest(const char *out_dir, size_t passed,
                                     char path[PATH_MAX], Error *err) {
    CheckpointEntry *list;
    path[0] = '\0';
    if (access(out_dir, R_OK | X_OK) != 0 && errno != ENOENT) {
        return error_set(err, "cannot read %s: %s", out_dir, strerror(errno));
    }
    size_t count = checkpoint_list(out_dir, false, &list);
    if (passed < count) strcpy(path, list[count - 1 - passed].path);
    free(list);
    return passed < count || passed == 0;
}

#endif
