// outputs.h: the files that a run writes beside its checkpoints, checked before any work is done and lost: they can be
// written, and nothing is overwritten that is not a former output.
//
// defines: outputs_check
#ifndef LLMC_OUTPUTS_H
#define LLMC_OUTPUTS_H

#include "llmc/host/checkpoint.h"
#include "llmc/host/dataloader.h"
#include "llmc/host/log.h"
#include "llmc/host/options.h"

// Two names of one file?
static inline bool same_file_on_disk(const char *a, const char *b) {
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

// Refuses an output that is a file which the run reads. NULL stands for no file.
static inline bool output_is_no_input(const char *flag, const char *path, const char *input, Error *err) {
    if (!path || !input || !same_file_on_disk(path, input)) return true;
    return error_set(err, "%s would overwrite %s, which this run reads: give it another file", flag, input);
}

static inline bool output_is_no_shard(const char *flag, const char *path, const DataLoader *data, Error *err) {
    for (size_t i = 0; i < data->count; i++) {
        if (!output_is_no_input(flag, path, data->shards[i].path, err)) return false;
    }
    return true;
}

// Proves that the file can be written, and leaves no new one behind. Devices and pipes are written through where what
// is written is a stream; `regular`: where it is not, they and links are refused, as renaming would replace them.
static inline bool output_can_be_written(const char *flag, const char *path, bool regular, Error *err) {
    struct stat info, link;
    bool is_link = lstat(path, &link) == 0 && S_ISLNK(link.st_mode), there = stat(path, &info) == 0;
    if (is_link && (regular || !there)) {
        return error_set(err, "%s %s is a symbolic link%s: name the file itself", flag, path,
                         there ? "" : " to nothing");
    }
    if (there && S_ISDIR(info.st_mode)) return error_set(err, "%s %s is a folder: name a file", flag, path);
    if (there && !S_ISREG(info.st_mode)) {
        return !regular || error_set(err, "%s %s is not a regular file: name one", flag, path);
    }
    int fd = open(path, O_WRONLY | O_NONBLOCK | O_CLOEXEC | (there ? 0 : O_CREAT), 0666);
    if (fd < 0) return error_set(err, "cannot write %s %s: %s", flag, path, strerror(errno));
    close(fd);
    if (!there) unlink(path);
    return true;
}

// One rank calls it, before any work. from: the folder that the weights come from, or NULL.
static inline bool outputs_check(const Options *o, const char *from, const DataLoader *train, const DataLoader *val,
                                 Error *err) {
    const struct { const char *flag, *path; } outputs[] = {
        {"--log", o->log}, {"--trace", o->trace}, {"--dump-gradients", o->dump_gradients}};
    for (int i = 0; i < 3; i++) {
        const char *flag = outputs[i].flag, *path = outputs[i].path;
        if (!path) continue;
        if (!output_can_be_written(flag, path, i == 2, err) || !output_is_no_shard(flag, path, train, err) ||
            !output_is_no_shard(flag, path, val, err) || !output_is_no_input(flag, path, o->tokenizer, err) ||
            !output_is_no_input(flag, path, o->eval, err)) {
            return false;
        }
        for (int f = 0; from && f < CHECKPOINT_FILE_COUNT; f++) {
            char file[PATH_MAX];
            if (!path_print(file, sizeof file, err, "%s/%s", from, CHECKPOINT_FILES[f]) ||
                !output_is_no_input(flag, path, file, err)) return false;
        }
        for (int j = 0; j < i; j++) {
            struct stat info;
            bool device = stat(path, &info) == 0 && !S_ISREG(info.st_mode);
            if (!outputs[j].path || device) continue;
            if (strcmp(path, outputs[j].path) == 0 || same_file_on_disk(path, outputs[j].path)) {
                return error_set(err, "%s and %s are both %s: give each a file of its own", outputs[j].flag, flag,
                                 path);
            }
        }
    }
    return !o->log || log_check(o->log, err);
}

#endif
