// outputs.h: checks the files that a run writes beside its checkpoints, before any work is
// lost. They must be writable. A file is overwritten only if it is a former output, so that
// no input is lost.
//
// defines: outputs_check
#ifndef LLMC_OUTPUTS_H
#define LLMC_OUTPUTS_H

#include "llmc/host/checkpoint.h"
#include "llmc/host/log.h"
#include "llmc/host/options.h"
#include "llmc/host/trace.h"

typedef struct {
    const char *flag, *path;
    const char *start;  // a former output, if not empty, has these bytes
    uint64_t at;        // there
    int fd;             // -1: not open
    bool made;          // the name was not there
    struct stat info;
} Output;

// Opens the file, to prove that it can be written.
static inline bool output_open(Output *x, Error *err) {
    char begin[64];
    uint64_t size;
    size_t length = strlen(x->start);
    x->made = lstat(x->path, &x->info) != 0;
    x->fd = file_open(x->path, O_RDWR | O_CREAT, &size, err);
    if (x->fd < 0 || fstat(x->fd, &x->info) != 0) return false;
    if (size == 0 ||
        (file_read_at(x->fd, begin, length, x->at) && memcmp(begin, x->start, length) == 0))
        return true;
    return error_set(
        err, "%s would overwrite %s, which is no former output of it: name a new file",
        x->flag, x->path);
}

// Checks all outputs. One rank calls it, before any work.
static inline bool outputs_check(const Options *o, Error *err) {
    char unfinished[PATH_MAX];
    struct stat none = {};
    bool dumps = o->dump_gradients != NULL;
    bool ok = !dumps ||
              path_print(unfinished, err, GRADIENTS_UNFINISHED, o->dump_gradients);
    Output outputs[] = {
        {"--log", o->log, LOG_START, 0, -1, false, none},
        {"--trace", o->trace, TRACE_START, 0, -1, false, none},
        {"--dump-gradients", o->dump_gradients, GRADIENTS_START, 8, -1, false, none},
        {"--dump-gradients", dumps ? unfinished : NULL, GRADIENTS_START, 8, -1, false,
         none}};
    for (Output *x = outputs; x < outputs + 4 && ok; x++) {
        ok = !x->path || output_open(x, err);
        for (Output *y = outputs; y < x && ok; y++) {
            if (x->fd >= 0 && y->fd >= 0 && x->info.st_dev == y->info.st_dev &&
                x->info.st_ino == y->info.st_ino)
                ok = error_set(err, "%s and %s are both %s: give each a file of its own",
                               y->flag, x->flag, x->path);
        }
    }
    for (Output *x = outputs; x < outputs + 4; x++) {
        if (x->made) unlink(x->path);
        if (x->fd >= 0) close(x->fd);
    }
    return ok;
}

#endif
