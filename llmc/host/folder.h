// folder.h: folders of checkpoints: making, listing, replacing and removing them so that an interruption at
// any moment leaves either the old or the new one.
//
// defines: path_print, folder_make, folder_check_writable, folder_remove, folder_sync, folder_replace,
//          folder_list
#ifndef LLMC_FOLDER_H
#define LLMC_FOLDER_H

#include "llmc/host/file.h"

#include <ctype.h>
#include <dirent.h>
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

// Makes the folder and proves that files can be created in it: the check of --out before any work.
static inline bool folder_check_writable(const char *dir, Error *err) {
    char path[PATH_MAX];
    if (!folder_make(dir, err)) return false;
    if (!path_print(path, sizeof path, err, "%s/tmp-probe-%ld", dir, (long)getpid())) return false;
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0) return error_set(err, "cannot write to %s: %s", dir, strerror(errno));
    close(fd);
    unlink(path);
    return true;
}

// Removes a folder and the files in it, but no folders in it. One that is not there is fine.
static inline void folder_remove(const char *dir) {
    DIR *d = opendir(dir);
    if (!d) return;
    for (struct dirent *e; (e = readdir(d)) != NULL;) unlinkat(dirfd(d), e->d_name, 0);
    closedir(d);
    rmdir(dir);
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

// Gives the folder `from` the name `to`. One that has it is swapped out in one step, then removed.
static inline bool folder_replace(const char *from, const char *to, Error *err) {
    if (rename(from, to) == 0) return true;
    bool taken = errno == ENOTEMPTY || errno == EEXIST;
#if defined(__linux__) && defined(SYS_renameat2)
    const unsigned exchange = 2;  // RENAME_EXCHANGE
    if (taken && syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, exchange) == 0) {
        folder_remove(from);
        return true;
    }
#endif
    char old[PATH_MAX];  // a file system that cannot swap: aside, then in
    if (taken && path_print(old, sizeof old, err, "%s.old", from) && rename(to, old) == 0) {
        if (rename(from, to) == 0) {
            folder_remove(old);
            return true;
        }
        int reason = errno;
        if (rename(old, to) != 0) {
            return error_set(err, "cannot rename %s to %s: the old one is now %s", from, to, old);
        }
        errno = reason;
    }
    return error_set(err, "cannot rename %s to %s: %s", from, to, strerror(errno));
}

typedef struct {
    char text[64];
    size_t step;
    bool stale;  // tmp-*: left by a save that was interrupted
} FolderName;

typedef struct {
    size_t count;
    FolderName *names;  // sorted by step; free() it
} FolderList;

static inline int folder_compare(const void *a, const void *b) {
    const FolderName *x = (const FolderName *)a, *y = (const FolderName *)b;
    return x->step < y->step ? -1 : x->step > y->step;
}

// The entries step-<digits> and tmp-<digits>* of a folder; all others belong to somebody else.
static inline FolderList folder_list(const char *dir) {
    FolderList list = {0, NULL};
    DIR *d = opendir(dir);
    if (!d) return list;
    size_t room = 0;
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        bool step = strncmp(e->d_name, "step-", 5) == 0, stale = strncmp(e->d_name, "tmp-", 4) == 0;
        const char *digits = e->d_name + (step ? 5 : 4);
        if ((!step && !stale) || !isdigit((unsigned char)*digits)) continue;
        if (strlen(e->d_name) >= sizeof list.names->text) continue;
        char *end;
        errno = 0;
        unsigned long long number = strtoull(digits, &end, 10);
        if (errno || (*end && (step || strcmp(end, ".old") != 0))) continue;
        if (list.count == room) {
            room = room ? 2 * room : 16;
            list.names = (FolderName *)host_resize(list.names, room, sizeof(FolderName));
        }
        FolderName *x = &list.names[list.count++];
        strcpy(x->text, e->d_name);
        x->step = (size_t)number;
        x->stale = stale;
    }
    closedir(d);
    if (list.count) qsort(list.names, list.count, sizeof(FolderName), folder_compare);
    return list;
}

#endif
