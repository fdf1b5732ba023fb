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
#include "llmc/host/trace.h"

// Or will they be, once files of these names are made: one name in one folder?
static inline bool same_file(const char *a, const char *b) {
    const char *x = strrchr(a, '/'), *y = strrchr(b, '/');
    char folder[2][PATH_MAX];
    if (same_file_on_disk(a, b)) return true;
    if (strcmp(x ? x + 1 : a, y ? y + 1 : b) != 0) return false;
    snprintf(folder[0], PATH_MAX, "%.*s", x ? (int)(x + 1 - a) : 1, x ? a : ".");
    snprintf(folder[1], PATH_MAX, "%.*s", y ? (int)(y + 1 - b) : 1, y ? b : ".");
    return same_file_on_disk(folder[0], folder[1]);
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

// Proves that the file can be written, and leaves no new one behind. Devices, and pipes that are read, are written
// through where what is written is a stream; `regular`: where it is not, they and links are refused, as renaming would
// replace them.
static inline bool output_can_be_written(const char *flag, const char *path, bool regular, Error *err) {
    struct stat info, link;
    bool is_link = lstat(path, &link) == 0 && S_ISLNK(link.st_mode), there = stat(path, &info) == 0;
    if (is_link && (regular || !there)) {
        return error_set(err, "%s %s is a symbolic link%s: name the file itself", flag, path,
                         there ? "" : " to nothing");
    }
    if (there && S_ISDIR(info.st_mode)) return error_set(err, "%s %s is a folder: name a file", flag, path);
    if (regular && there && !S_ISREG(info.st_mode)) {
        return error_set(err, "%s %s is not a regular file: name one", flag, path);
    }
    int fd = open(path, O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC | (there ? 0 : O_CREAT), 0666);
    bool is_pipe = there && S_ISFIFO(info.st_mode);
    if (fd < 0) {
        return error_set(err, "cannot write %s %s: %s", flag, path,
                         is_pipe && errno == ENXIO ? "nobody reads from that pipe" : strerror(errno));
    }
    if (is_pipe) return true;  // and stays open: its reader would take closing it for the end
    close(fd);
    if (!there) unlink(path);
    return true;
}

// Refuses a file that is not a former output: none of its names may be lost, and it is empty or has `start` at byte
// `at`. NULL: any start.
static inline bool output_is_former(const char *flag, const char *path, const char *start, uint64_t at, Error *err) {
    char begin[64];
    struct stat info;
    size_t got = 0, length = start ? strlen(start) : 0;
    if (stat(path, &info) != 0 || !S_ISREG(info.st_mode) || info.st_size == 0) return true;
    if (info.st_nlink > 1) return error_set(err, "%s %s has another name (a hard link): name a new file", flag, path);
    int fd = start ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    bool ours = !start || (fd >= 0 && file_read_at(fd, begin, length, at, &got) && got == length &&
                           memcmp(begin, start, length) == 0);
    if (fd >= 0) close(fd);
    return ours || error_set(err, "%s would overwrite %s, which is no former output of it: name a new file", flag, path);
}

// Nor one that the weights, or what training starts from, are in.
static inline bool output_is_no_weights(const char *flag, const char *path, const char *from, Error *err) {
    DIR *dir = from ? opendir(from) : NULL;
    bool ok = true;
    for (struct dirent *e; ok && dir && (e = readdir(dir)) != NULL;) {
        char file[PATH_MAX];
        const char *dot = strrchr(e->d_name, '.');
        if (!dot || (strcmp(dot, ".json") != 0 && strcmp(dot, ".safetensors") != 0)) continue;
        ok = path_print(file, sizeof file, err, "%s/%s", from, e->d_name) && output_is_no_input(flag, path, file, err);
    }
    if (dir) closedir(dir);
    return ok;
}

// Two outputs in one file? Devices may take several.
static inline bool output_is_no_other(const char *flag, const char *path, const char *other_flag, const char *other,
                                      Error *err) {
    struct stat info;
    if (!other || (stat(path, &info) == 0 && !S_ISREG(info.st_mode))) return true;
    return !same_file(path, other) || error_set(err, "%s and %s are both %s: give each a file of its own",
                                                other_flag, flag, path);
}

// One rank calls it, before any work. from: the folder that the weights come from, or NULL.
static inline bool outputs_check(const Options *o, const char *from, const DataLoader *train, const DataLoader *val,
                                 Error *err) {
    char unfinished[PATH_MAX];
    if (o->dump_gradients && !gradients_unfinished(unfinished, o->dump_gradients, err)) return false;
    const struct { const char *flag, *path, *start; uint64_t at; bool regular; } outputs[] = {
        {"--log", o->log, NULL, 0, false}, {"--trace", o->trace, TRACE_START, 0, false},
        {"--dump-gradients", o->dump_gradients, GRADIENTS_START, 8, true},
        {"--dump-gradients", o->dump_gradients ? unfinished : NULL, GRADIENTS_START, 8, true}};
    const char *inputs[] = {o->tokenizer, o->eval, o->schedule_file, o->virtual_time, o->simulate};
    for (size_t i = 0; i < sizeof outputs / sizeof outputs[0]; i++) {
        const char *flag = outputs[i].flag, *path = outputs[i].path;
        if (!path) continue;
        if (!output_can_be_written(flag, path, outputs[i].regular, err) ||
            !output_is_no_shard(flag, path, train, err) || !output_is_no_shard(flag, path, val, err) ||
            !output_is_no_weights(flag, path, from, err)) return false;
        for (size_t j = 0; j < sizeof inputs / sizeof inputs[0]; j++) {
            if (!output_is_no_input(flag, path, inputs[j], err)) return false;
        }
        for (size_t j = 0; j < i; j++) {
            if (!output_is_no_other(flag, path, outputs[j].flag, outputs[j].path, err)) return false;
        }
        if (!output_is_former(flag, path, outputs[i].start, outputs[i].at, err)) return false;
    }
    return !o->log || log_check(o->log, err);
}

#endif
