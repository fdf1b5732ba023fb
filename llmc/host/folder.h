// folder.h: making, locking and replacing folders.
//
// defines: path_print, process_name, folder_make, folder_sync, folder_replace, folder_lock
#ifndef LLMC_FOLDER_H
#define LLMC_FOLDER_H

#include "llmc/host/file.h"

#include <limits.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif

// snprintf into a path; false with a sentence if it does not fit.
__attribute__((format(printf, 4, 5))) static inline bool path_print(char *path, size_t size, Error *err,
                                                                    const char *format, ...) {
    va_list args;
    va_start(args, format);
    int n = vsnprintf(path, size, format, args);
    va_end(args);
    return (n >= 0 && (size_t)n < size) || error_set(err, "the path %.200s... is too long", path);
}

enum { PROCESS_NAME_SIZE = 80 };

// "HOST-PID": a name that no other living process has, on any node.
static inline void process_name(char name[PROCESS_NAME_SIZE]) {
    char host[65] = "";
    if (gethostname(host, sizeof host - 1) != 0 || strchr(host, '/')) strcpy(host, "host");
    snprintf(name, PROCESS_NAME_SIZE, "%s-%ld", host, (long)getpid());
}

// Makes the folder and those above it, where they are missing.
static inline bool folder_make(const char *dir, Error *err) {
    char path[PATH_MAX];
    if (!path_print(path, sizeof path, err, "%s", dir)) return false;
    for (char *p = path + 1; path[0]; p++) {
        char c = *p;
        if (c != '/' && c != '\0') continue;
        *p = '\0';
        int failure = mkdir(path, 0777) == 0 ? 0 : errno;
        if (failure && access(path, F_OK) != 0) {
            return error_set(err, "cannot create the folder %s: %s", path, strerror(failure));
        }
        *p = c;
        if (!c) break;
    }
    struct stat info;
    if (stat(dir, &info) != 0) return error_set(err, "cannot use the folder '%s': %s", dir, strerror(errno));
    return S_ISDIR(info.st_mode) || error_set(err, "cannot write to %s: it is not a folder", dir);
}

// Waits until the entries of a folder are on the disk.
static inline bool folder_sync(const char *dir, Error *err) {
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return error_set(err, "cannot open the folder %s: %s", dir, strerror(errno));
    // EINVAL: a file system that has no such operation, and then nothing to wait for.
    bool ok = fsync(fd) == 0 || errno == EINVAL;
    if (!ok) error_set(err, "cannot sync the folder %s: %s", dir, strerror(errno));
    close(fd);
    return ok;
}

// Gives the folder `from` the name `to`. What has it already, whatever it is, gets the name `from` in the same step.
static inline bool folder_replace(const char *from, const char *to, Error *err) {
    if (rename(from, to) == 0) return true;  // there was nothing, or an empty folder
    bool taken = errno == ENOTEMPTY || errno == EEXIST || errno == ENOTDIR;
#if defined(__linux__) && defined(SYS_renameat2)
    const unsigned exchange = 2;  // RENAME_EXCHANGE
    if (taken && syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, exchange) == 0) return true;
#endif
    char aside[PATH_MAX];  // a file system that cannot swap: in three steps
    if (taken && path_print(aside, sizeof aside, err, "%s.old", from) && rename(to, aside) == 0) {
        if (rename(from, to) == 0) {
            if (rename(aside, from) != 0) fprintf(stderr, "note: what was %s is now %s\n", to, aside);
            return true;
        }
        int reason = errno;
        if (rename(aside, to) != 0) {
            return error_set(err, "cannot rename %s to %s: the old one is now %s", from, to, aside);
        }
        errno = reason;
    }
    return error_set(err, "cannot rename %s to %s: %s", from, to, strerror(errno));
}

// Locks the folder for this process until it ends, however it ends, through a file .lock that stays. False with a
// sentence if another process has locked it. Where the file system has no locks it returns true, *locked is false and
// err says why. On NFS the server holds the lock for all nodes (mounted with nolock, a node sees only its own locks).
static inline bool folder_lock(const char *dir, bool *locked, Error *err) {
    char path[PATH_MAX], name[PROCESS_NAME_SIZE];
    *locked = false;
    if (!path_print(path, sizeof path, err, "%s/.lock", dir)) return false;
    int fd = open(path, O_RDWR | O_CREAT | O_NONBLOCK | O_CLOEXEC, 0666);
    if (fd < 0) return error_set(err, "cannot open %s: %s", path, strerror(errno));
    struct flock whole;
    memset(&whole, 0, sizeof whole);
    whole.l_type = F_WRLCK;
    whole.l_whence = SEEK_SET;
    *locked = fcntl(fd, F_SETLK, &whole) == 0;
    if (*locked) {  // fd stays open: closing it would end the lock
        process_name(name);
        size_t n = strlen(name);
        return (ftruncate(fd, 0) == 0 && file_write_at(fd, name, n, 0)) ||
               error_set(err, "cannot write %s: %s", path, strerror(errno));
    }
    bool held = errno == EAGAIN || errno == EACCES;
    if (held) {
        size_t got = 0;
        file_read_at(fd, name, sizeof name - 1, 0, &got);
        name[got] = '\0';
        error_set(err, "%s is in use by another run%s%s: give this one another --out, or wait for that one to end", dir,
                  got ? ", process " : "", name);
    } else {
        error_set(err, "%s cannot be locked (%s): see to it that no other run writes to it", dir, strerror(errno));
    }
    close(fd);
    return !held;
}

#endif
