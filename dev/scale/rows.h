// rows.h: reads a table of published runs (dev/scale/rows_a100.csv).
//
// defines: Row, rows_read
#ifndef DEV_SCALE_ROWS_H
#define DEV_SCALE_ROWS_H

#include "dev/scale/step.h"

enum { ROW_FIELDS = 32 };

typedef struct {
    char id[64];
    StepLayout run;
    double seconds;  // published
    bool bad;        // no full layout, or no step time
    char why[96];
} Row;

// Cuts a line in place at its commas; a field in quotes may hold commas, and quotes that are
// doubled. Returns the number of fields.
static inline size_t row_cut(char *line, char *fields[ROW_FIELDS]) {
    size_t n = 0;
    for (char *at = line; n < ROW_FIELDS;) {
        char *to = at;
        fields[n++] = to;
        if (*at == '"') {
            for (at++; *at && (*at != '"' || at[1] == '"'); at++) {
                at += *at == '"';
                *to++ = *at;
            }
            at += *at == '"';
        }
        while (*at && *at != ',') *to++ = *at++;
        bool more = *at == ',';
        *to = 0;
        if (!more) break;
        at++;
    }
    return n;
}

static inline const char *row_field(char **header, size_t columns, char **fields, size_t n,
                                    const char *name) {
    for (size_t i = 0; i < columns && i < n; i++)
        if (strcmp(header[i], name) == 0) return fields[i];
    return "";
}

// Returns a whole number up to 2^20, so that no product of three passes 2^64. Returns 0 if
// the text is none.
static inline size_t row_number(const char *text) {
    char *end;
    unsigned long x = strtoul(text, &end, 10);
    return end == text || (*end && *end != ' ') || x > 1048576 ? 0 : (size_t)x;
}

// Fills a row, and says in row->why what it lacks if it is bad.
static inline void row_parse(char **header, size_t columns, char **fields, size_t n, Row *row) {
#define ROW_NUMBER(name) row_number(row_field(header, columns, fields, n, name))
    memset(row, 0, sizeof *row);
    snprintf(row->id, sizeof row->id, "%s", row_field(header, columns, fields, n, "id"));
    StepLayout *r = &row->run;
    r->ranks = ROW_NUMBER("gpus"), r->layers = ROW_NUMBER("layers"), r->C = ROW_NUMBER("hidden");
    r->NH = ROW_NUMBER("heads"), r->T = ROW_NUMBER("seq"), r->vocabulary = ROW_NUMBER("vocab");
    r->global_batch = ROW_NUMBER("gbs"), r->micro_batch = ROW_NUMBER("mbs");
    r->t = ROW_NUMBER("t"), r->p = ROW_NUMBER("p"), r->d = ROW_NUMBER("d"), r->v = ROW_NUMBER("v");
    r->shard = ROW_NUMBER("shard"), r->KV = ROW_NUMBER("kv_heads");
    if (r->KV == r->NH) r->KV = 0;  // GPT-2's block
#undef ROW_NUMBER
    const char *recompute = row_field(header, columns, fields, n, "recompute");
    const char *chunks = row_field(header, columns, fields, n, "v");
    r->recompute = strcmp(recompute, "full") == 0 || strcmp(recompute, "full?") == 0 ? LAYER_WHOLE
                   : strcmp(recompute, "selective") == 0 ? LAYER_ATTENTION : LAYER_KEEPS;
    bool kept = strcmp(recompute, "none") == 0 || strstr(recompute, "0 layers") != NULL;
    if (r->recompute == LAYER_KEEPS && !kept)
        snprintf(row->why, sizeof row->why, "recompute is '%.40s'", recompute);
    r->sequence_parallel = strcmp(row_field(header, columns, fields, n, "seq_par"), "1") == 0;
    r->scatter_gather = strcmp(row_field(header, columns, fields, n, "scatter_gather"), "0") != 0;
    snprintf(r->stages, sizeof r->stages, "%s",
             row_field(header, columns, fields, n, "layers_per_stage"));
    r->zero = strcmp(row_field(header, columns, fields, n, "dist_opt"), "1") == 0;
    r->short_ends =
        strstr(row_field(header, columns, fields, n, "note"), "hold one layer fewer") != NULL;
    if (r->v == 0 && r->p && strncmp(chunks, "max: 1 layer", 12) == 0)
        r->v = (r->layers + (r->short_ends ? 2 : 0)) / r->p;
    r->schedule = r->v > 1 ? SCHEDULE_INTERLEAVED : SCHEDULE_1F1B;
    size_t multiple = 128 * (r->t ? r->t : 1);  // Megatron pads the vocabulary
    r->vocabulary = (r->vocabulary + multiple - 1) / multiple * multiple;
    row->seconds = strtod(row_field(header, columns, fields, n, "step_s"), NULL);
    const struct { const char *name; size_t value;
    } sizes[] = {{"gpus", r->ranks},
                 {"layers", r->layers},
                 {"hidden", r->C},
                 {"heads", r->NH},
                 {"seq", r->T},
                 {"vocab", r->vocabulary},
                 {"gbs", r->global_batch},
                 {"mbs", r->micro_batch},
                 {"t", r->t},
                 {"p", r->p},
                 {"d", r->d},
                 {"v", r->v},
                 {"step_s", row->seconds > 0 && row->seconds < INFINITY}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes && !row->why[0]; i++)
        if (!sizes[i].value)
            snprintf(row->why, sizeof row->why, "%s is no number that a run has", sizes[i].name);
    // Some ran with batches that do not divide.
    if (!row->why[0] && r->global_batch % (r->micro_batch * r->d))
        snprintf(row->why, sizeof row->why, "the batch is no multiple of mbs * d");
    row->bad = row->why[0] != 0;
}

// Appends the table's rows, bad ones too, to *rows, which is NULL or from here; free() it.
static inline bool rows_read(const char *path, Row **rows, size_t *count, Error *err) {
    size_t bytes, columns = 0;
    char *text = file_read(path, (size_t)1 << 24, &bytes, err), *header[ROW_FIELDS];
    if (!text) return false;
    for (char *line = text; line && *line;) {
        char *end = strchr(line, '\n'), *fields[ROW_FIELDS];
        if (end) *end = 0;
        line[strcspn(line, "\r")] = 0;
        *rows = (Row *)host_resize(*rows, *count + 1, sizeof **rows);
        if (!columns) columns = row_cut(line, header);
        else if (*line)
            row_parse(header, columns, fields, row_cut(line, fields), &(*rows)[(*count)++]);
        line = end ? end + 1 : NULL;
    }
    free(text);
    return true;
}

#endif
