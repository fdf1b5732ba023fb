// pictures.h: draws pictures for tests, and reads them. Define _XOPEN_SOURCE 700 before the
// first include.
//
// defines: picture_folder, write_in, occurrences, read_output, read_picture
#ifndef DEV_TEST_PICTURES_H
#define DEV_TEST_PICTURES_H

#include <unistd.h>

#include "dev/test/files.h"

// The folder of a test's pictures: the one that its argument names, where they stay to be looked
// at, or a new one.
static inline void picture_folder(char dir[512], const char *test, int argc, char **argv) {
    if (argc > 1) snprintf(dir, 512, "%s", argv[1]);
    else snprintf(dir, 512, "%s/%s.XXXXXX", getenv("TMPDIR") ? getenv("TMPDIR") : P_tmpdir, test);
    if (argc > 1 ? mkdir(dir, 0777) != 0 && errno != EEXIST : !mkdtemp(dir))
        die("cannot make", dir);
}

static inline void write_in(const char *dir, const char *name, const char *text) {
    write_text(in(dir, name), text);
}

static inline size_t occurrences(const char *text, const char *part) {
    size_t n = 0;
    for (const char *at = text; (at = strstr(at, part)); at += strlen(part)) n++;
    return n;
}

// Returns the text of a file, or an empty one.
static inline char *read_output(const char *path) {
    char *text = read_file(path, NULL);
    return text ? text : calloc(1, 1);
}

// Returns the text of a picture in the folder, or an empty one if it is missing or an element is
// not closed.
static inline char *read_picture(const char *dir, const char *name) {
    char file[256];
    snprintf(file, sizeof file, "%s.svg", name);
    char *text = read_output(in(dir, file));
    bool whole = strncmp(text, "<svg ", 5) == 0 && occurrences(text, "</svg>") == 1 &&
                 occurrences(text, "<") == occurrences(text, ">") && !strstr(text, "nan") &&
                 !strstr(text, "inf") && occurrences(text, "<text") == occurrences(text, "</text>");
    if (!whole) text[0] = 0;
    return text;
}

#endif
