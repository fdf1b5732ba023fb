// pipeline_text.h: schedules written by hand, one line for each stage.
//
//   # two stages, two micro-batches, backwards by halves
//   F0 F1 B0 W0 B1 W1
//   F0 B0 F1 W0 B1 W1
//
// F is a forward, B a backward, W a weight step; then the micro-batch, from 0; with several chunks a stage a dot and
// the chunk, from 0: F3.1. A semicolon ends a line as well, so that a schedule fits on a command line; '#' starts a
// comment. A stage whose line has no W does both halves of a backward in B. Whether such a schedule can be run is for
// llmc/pipeline_proof.h to say.
//
// defines: pipeline_text_parse, pipeline_text_read
#ifndef LLMC_PIPELINE_TEXT_H
#define LLMC_PIPELINE_TEXT_H

#include <ctype.h>

#include "llmc/host/file.h"
#include "llmc/pipeline_lists.h"

enum { PIPELINE_TEXT_BYTES = 64 << 20, PIPELINE_TEXT_DIGITS = 6 };

// A number of at most PIPELINE_TEXT_DIGITS digits at *text, which moves behind it; -1: there is none.
static inline int pipeline_text_number(const char **text) {
    int value = 0, digits = 0;
    for (; isdigit((unsigned char)**text) && digits <= PIPELINE_TEXT_DIGITS; (*text)++, digits++) {
        value = 10 * value + (**text - '0');
    }
    return digits == 0 || digits > PIPELINE_TEXT_DIGITS ? -1 : value;
}

// One word of `length` characters as a step.
static inline bool pipeline_text_step(const char *word, size_t length, PipelineStep *step) {
    static const char letters[] = "FBW";
    const char *kind = strchr(letters, *word), *at = word + 1;
    step->chunk = 0;
    step->kind = (StepKind)(kind ? kind - letters : 0);
    step->micro = pipeline_text_number(&at);
    if (*at == '.' && step->micro >= 0) {
        at++;
        step->chunk = pipeline_text_number(&at);
    }
    return kind && step->micro >= 0 && step->chunk >= 0 && at == word + length;
}

// Appends a step to the last stage, and counts micro-batches and chunks.
static inline void pipeline_text_add(PipelineLists *l, size_t *room, PipelineStep step) {
    size_t *count = &l->counts[l->p - 1];
    PipelineStep **steps = &l->steps[l->p - 1];
    if (*count == *room) {
        *room = *room ? 2 * *room : 64;
        *steps = (PipelineStep *)host_resize(*steps, *room, sizeof **steps);
    }
    (*steps)[(*count)++] = step;
    if (step.micro + 1 > l->m) l->m = step.micro + 1;
    if (step.chunk + 1 > l->v) l->v = step.chunk + 1;
}

// Reads a schedule; p, m and v follow from it. name: what to call it in a sentence that refuses it. Release with
// pipeline_lists_free in either case.
static inline bool pipeline_text_parse(const char *name, const char *text, PipelineLists *l, Error *err) {
    memset(l, 0, sizeof *l);
    size_t line = 1, word = 0, room = 0;
    for (const char *at = text; *at;) {
        if (*at == '#') at += strcspn(at, "\n");
        else if (*at == '\n' || *at == ';') line++, word = 0, at++;
        else if (isspace((unsigned char)*at)) at++;
        else {
            size_t length = strcspn(at, " \t\r\n\v\f;#");
            PipelineStep step;
            word++;
            if (!pipeline_text_step(at, length, &step))
                return error_set(err,
                                 "%s, line %zu, word %zu: '%.*s' is no step: write F, B or W and a micro-batch from 0, "
                                 "as in F0, and with several chunks a dot and the chunk, as in F0.1",
                                 name, line, word, length < 20 ? (int)length : 20, at);
            if (word == 1) {  // the first word of a line: one more stage
                l->steps = (PipelineStep **)host_resize(l->steps, (size_t)l->p + 1, sizeof *l->steps);
                l->counts = (size_t *)host_resize(l->counts, (size_t)l->p + 1, sizeof *l->counts);
                l->steps[l->p] = NULL;
                l->counts[l->p++] = room = 0;
            }
            pipeline_text_add(l, &room, step);
            at += length;
        }
    }
    if (l->p == 0) return error_set(err, "%s has no steps: write one line for each stage, as in F0 F1 B0 B1", name);
    return true;
}

static inline bool pipeline_text_read(const char *path, PipelineLists *l, Error *err) {
    size_t bytes;
    memset(l, 0, sizeof *l);
    char *text = file_read(path, PIPELINE_TEXT_BYTES, &bytes, err);
    if (!text) return false;
    bool ok = strlen(text) == bytes ? pipeline_text_parse(path, text, l, err)
                                    : error_set(err, "%s is not a text: it holds a zero byte", path);
    free(text);
    return ok;
}

#endif
