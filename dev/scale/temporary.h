// temporary.h: a file that a tool needs for a while, where TMPDIR says.
//
// defines: TEMPORARY_PATH, temporary_file
#ifndef DEV_SCALE_TEMPORARY_H
#define DEV_SCALE_TEMPORARY_H

#include <stdlib.h>

#include "llmc/host/folder.h"

enum { TEMPORARY_PATH = 512 };  // short enough for a command line

// Makes an empty file in the folder TMPDIR, or in /tmp, and opens it; -1 with a sentence. Close and remove it.
static inline int temporary_file(char path[TEMPORARY_PATH], const char *name, Error *err) {
    const char *folder = getenv("TMPDIR");
    if (!folder || !*folder) folder = "/tmp";
    if (!path_print(path, TEMPORARY_PATH, err, "%s/%s-XXXXXX", folder, name)) return -1;
    int fd = mkstemp(path);
    if (fd < 0) error_set(err, "cannot make a temporary file in %s (TMPDIR): %s", folder, strerror(errno));
    return fd;
}

#endif
