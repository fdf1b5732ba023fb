// checkpoint_list.h: the checkpoints under --out: who may write there, which is the newest, which ones go.
//
// defines: CheckpointVerify, checkpoint_claim, checkpoint_latest, checkpoint_prune
#ifndef LLMC_CHECKPOINT_LIST_H
#define LLMC_CHECKPOINT_LIST_H

#include <ctype.h>

#include "llmc/host/checkpoint.h"

typedef struct {
    char name[128];
    size_t step;
    bool unfinished;        // tmp-STEP-HOST-PID: a save that goes on or was interrupted
    struct timespec saved;  // when trainer.json was written; 0: there is none, so it is no checkpoint
} CheckpointEntry;

typedef struct {
    size_t count;
    CheckpointEntry *entries;  // [count] the one that was saved last comes last; free() it
} CheckpointList;

static inline int checkpoint_compare(const void *a, const void *b) {
    const CheckpointEntry *x = (const CheckpointEntry *)a, *y = (const CheckpointEntry *)b;
    if (x->saved.tv_sec != y->saved.tv_sec) return x->saved.tv_sec < y->saved.tv_sec ? -1 : 1;
    if (x->saved.tv_nsec != y->saved.tv_nsec) return x->saved.tv_nsec < y->saved.tv_nsec ? -1 : 1;
    return x->step < y->step ? -1 : x->step > y->step;
}

// Is it a name that we give: step-00000100, or tmp-00000100-HOST-PID (with .old, see folder_replace)?
static inline bool checkpoint_parse_name(const char *name, CheckpointEntry *x) {
    char prefix[40];
    memset(x, 0, sizeof *x);
    x->unfinished = strncmp(name, "tmp-", 4) == 0;
    const char *digits = name + (x->unfinished ? 4 : 5), *last = strrchr(name, '-');
    if (strlen(name) >= sizeof x->name || strlen(name) < 12 || !isdigit((unsigned char)*digits)) return false;
    strcpy(x->name, name);
    x->step = (size_t)strtoull(digits, NULL, 10);
    snprintf(prefix, sizeof prefix, x->unfinished ? "tmp-%08zu-" : "step-%08zu", x->step);
    if (!x->unfinished) return strcmp(name, prefix) == 0;
    const char *end = last + 1 + strspn(last + 1, "0123456789");
    return strncmp(name, prefix, strlen(prefix)) == 0 && end > last + 1 && (*end == '\0' || strcmp(end, ".old") == 0);
}

// The checkpoints in a folder, complete or not; all other entries belong to somebody else.
static inline CheckpointList checkpoint_list(const char *out_dir) {
    CheckpointList list = {0, NULL};
    DIR *dir = opendir(out_dir);
    if (!dir) return list;
    size_t room = 0;
    for (struct dirent *e; (e = readdir(dir)) != NULL;) {
        CheckpointEntry x;
        char file[sizeof x.name + 16];
        if (!checkpoint_parse_name(e->d_name, &x)) continue;
        struct stat info;
        snprintf(file, sizeof file, "%s/trainer.json", x.name);
        if (fstatat(dirfd(dir), file, &info, 0) == 0) x.saved = info.st_mtim;
        if (list.count == room) {
            room = room ? 2 * room : 16;
            list.entries = (CheckpointEntry *)host_resize(list.entries, room, sizeof(CheckpointEntry));
        }
        list.entries[list.count++] = x;
    }
    closedir(dir);
    if (list.count) qsort(list.entries, list.count, sizeof(CheckpointEntry), checkpoint_compare);
    return list;
}

// Of the checkpoints up to `step` (the one just saved), removes all but the `keep` that were saved last; 0 keeps all.
// Stays: those of later steps, of a run that this one went back behind, and those that hold more than a checkpoint.
static inline void checkpoint_prune(const char *out_dir, size_t keep, size_t step) {
    char path[PATH_MAX], tmp[PATH_MAX];
    Error ignored;
    CheckpointList list = checkpoint_list(out_dir);
    size_t newer = 0;
    for (size_t i = list.count; i-- > 0 && keep > 0;) {
        const CheckpointEntry *x = &list.entries[i];
        if (x->unfinished || !x->saved.tv_sec || x->step > step || ++newer <= keep) continue;
        // Renamed first: an interrupted removal must not leave half a checkpoint under a good name.
        if (path_print(path, sizeof path, &ignored, "%s/%s", out_dir, x->name) && checkpoint_is_ours(path, x->step) &&
            checkpoint_tmp_path(tmp, sizeof tmp, out_dir, x->step, &ignored) && rename(path, tmp) == 0) {
            checkpoint_remove(tmp);
        }
    }
    free(list.entries);
}

// What saves that were interrupted have left: a checkpoint that lacked but its name gets it, the others go.
static inline void checkpoint_clean(const char *out_dir) {
    char path[PATH_MAX], final_path[PATH_MAX];
    Error ignored;
    CheckpointList list = checkpoint_list(out_dir);
    for (size_t i = 0; i < list.count; i++) {
        const CheckpointEntry *x = &list.entries[i];
        if (!x->unfinished || !path_print(path, sizeof path, &ignored, "%s/%s", out_dir, x->name) ||
            !path_print(final_path, sizeof final_path, &ignored, "%s/step-%08zu", out_dir, x->step)) continue;
        bool lacks_name = checkpoint_is_ours(path, x->step) && access(final_path, F_OK) != 0;
        if (lacks_name && rename(path, final_path) == 0) continue;
        if (checkpoint_looks_ours(path)) checkpoint_remove(path);
        else rmdir(path);  // interrupted before the first file, or somebody's
    }
    free(list.entries);
}

// The check of --out before any work: makes the folder, proves that checkpoints can be written there, and on the first
// rank locks it for this run until the process ends, so that no other run writes there.
static inline bool checkpoint_claim(const char *out_dir, bool first_rank, Error *err) {
    char path[PATH_MAX], file[PATH_MAX], process[PROCESS_NAME_SIZE];
    bool locked = false;
    if (!folder_make(out_dir, err)) return false;
    if (first_rank && !folder_lock(out_dir, &locked, err)) return false;
    if (first_rank && !locked) printf("note: %s\n", err->text);
    if (locked) checkpoint_clean(out_dir);
    // The longest path that will be written, whatever the step is.
    process_name(process);
    if (!path_print(path, sizeof path, err, "%s/try-%016d-%s", out_dir, 0, process) ||
        !path_print(file, sizeof file, err, "%s/optimizer.safetensors", path)) return false;
    if (mkdir(path, 0777) != 0) return error_set(err, "cannot write to %s: %s", out_dir, strerror(errno));
    int fd = open(file, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    bool ok = fd >= 0 || error_set(err, "cannot write to %s: %s", out_dir, strerror(errno));
    if (fd >= 0) close(fd);
    checkpoint_remove(path);
    return ok;
}

// Compares a folder with its checksums; false with a sentence that says what is damaged.
typedef bool (*CheckpointVerify)(void *context, const char *dir, Error *err);

// Can training go on from this folder? False with a sentence that says what is wrong with it. verify may be NULL.
static inline bool checkpoint_is_sound(const char *path, CheckpointVerify verify, void *context, Error *err) {
    TrainerState state;
    GPTConfig config;
    return checkpoint_read_state(path, &state, err) && checkpoint_read_config(path, &config, err) &&
           checkpoint_check(path, &config, true, state.bf16, err) && (!verify || verify(context, path, err));
}

// The checkpoint under out_dir that was saved last and is sound; path is empty where there is none at all. Says which
// ones it passes over. False: all of them are damaged, or there is no right to read them.
static inline bool checkpoint_latest(const char *out_dir, CheckpointVerify verify, void *context, char *path,
                                     size_t size, Error *err) {
    path[0] = '\0';
    if (access(out_dir, R_OK | X_OK) != 0 && errno != ENOENT) {
        return error_set(err, "cannot read %s: %s", out_dir, strerror(errno));
    }
    CheckpointList list = checkpoint_list(out_dir);
    bool ok = true, found = false;
    Error why;
    for (size_t i = list.count; i-- > 0 && !found;) {
        const CheckpointEntry *x = &list.entries[i];
        if (x->unfinished || !x->saved.tv_sec) continue;
        found = path_print(path, size, &why, "%s/%s", out_dir, x->name) &&
                checkpoint_is_sound(path, verify, context, &why);
        if (!found) printf("note: the checkpoint %s is passed over: %s\n", x->name, why.text);
        if (!found && ok) ok = error_set(err, "no checkpoint under %s is sound: %s", out_dir, why.text);
    }
    if (!found) path[0] = '\0';
    free(list.entries);
    return ok || found;
}

#endif
