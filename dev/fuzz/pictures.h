// pictures.h: fuzz targets: the programs of dev/plot.
//
// defines: fuzz_plots, fuzz_machine
#ifndef DEV_FUZZ_PICTURES_H
#define DEV_FUZZ_PICTURES_H

#include <setjmp.h>

#include "dev/fuzz/files.h"

static jmp_buf fuzz_ended;  // where a program goes that would exit
#define exit(code) longjmp(fuzz_ended, 1 + (code))
#include "dev/plot/programs.h"
#undef exit

// Draws a trace or a log. The picture goes to no file, and must have an end.
static void fuzz_plots(const uint8_t *data, size_t size) {
    char path[40];
    if (size < 1) return;
    int fd = fuzz_file(data + 1, size - 1, path);
    char *calls[][8] = {
        {"timeline", "--out", "/dev/null", path, NULL},
        {"timeline", "--retime", "--out", "/dev/null", path, NULL},
        {"timeline", "--costs", "1,2,0.5", "--pipeline", "2", "--out", "/dev/null", path},
        {"profile", "--skip", "0", "--out", "/dev/null", path, NULL},
        {"loss", "--out", "/dev/null", path, NULL},
        {"loss", "--smooth", "3", "--out", "/dev/null", path, NULL},
    };
    int which = data[0] % 6, count = 0;
    while (count < 8 && calls[which][count]) count++;
    char *words[9] = {NULL};
    memcpy(words, calls[which], (size_t)count * sizeof *words);
    optind = 0;
    int code = which < 3    ? timeline_main(count, words)
               : which == 3 ? profile_main(count, words)
                            : loss_main(count, words);
    fuzz_promise(code == 0 || code == 1);
    close(fd);
}

// Runs the command lines of schedule, a word a line, for pipelines of a few thousand steps.
// Writes no pictures.
static void fuzz_machine(const uint8_t *data, size_t size) {
    char *words[16] = {NULL}, *rest;
    int count = 1;
    double steps = 1;
    char *text = strndup((const char *)data, size);
    rest = text;
    words[0] = (char *)"schedule";
    for (char *word; count < 15 && (word = strsep(&rest, "\n"));) {
        if (strncmp(word, "--trac", 6) == 0 || strncmp(word, "--ta", 4) == 0)
            continue;  // files; a long table
        double x = strtod(word, NULL);
        if (x > 1) steps *= x;
        words[count++] = word;
    }
    optind = 0;
    if (steps <= 4000) {
        int ended = setjmp(fuzz_ended), code = ended ? ended - 1 : schedule_main(count, words);
        fuzz_promise(code >= 0 && code <= 2);
    }
    free(text);
}

#endif
