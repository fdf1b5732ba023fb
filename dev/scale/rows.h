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
} Row;

// Cuts a line in place at its commas; a field in quotes may hold commas. Returns the number of fields.
static inline size_t row_cut(char *line, char *fields[ROW_FIELDS]) {
    size_t n = 0;
    for (char *at = line; n < ROW_FIELDS;) {
        bool quoted = *at == '"';
        fields[n++] = at += quoted;
        at += strcspn(at, quoted ? "\"" : ",");
        if (quoted && *at) *at++ = 0;
        if (*at != ',') break;
        *at++ = 0;
    }
    return n;
}

static inline const char *row_field(char **header, size_t columns, char **fields, size_t n, const char *name) {
    for (size_t i = 0; i < columns && i < n; i++)
        if (strcmp(header[i], name) == 0) return fields[i];
    return "";
}

// A whole number up to 2^20, so that no product of three passes 2^64, or 0 where the text is none.
static inline size_t row_number(const char *text) {
    char *end;
    unsigned long x = strtoul(text, &end, 10);
    return end == text || (*end && *end != ' ') || x > 1048576 ? 0 : (size_t)x;
}

// False where the row has no full layout or no step time.
static inline bool row_parse(char **header, size_t columns, char **fields, size_t n, Row *row) {
#define ROW_NUMBER(name) row_number(row_field(header, columns, fields, n, name))
    memset(row, 0, sizeof *row);
    snprintf(row->id, sizeof row->id, "%s", row_field(header, columns, fields, n, "id"));
    StepLayout *r = &row->run;
    r->ranks = ROW_NUMBER("gpus"), r->layers = ROW_NUMBER("layers"), r->C = ROW_NUMBER("hidden");
    r->NH = ROW_NUMBER("heads"), r->T = ROW_NUMBER("seq"), r->vocabulary = ROW_NUMBER("vocab");
    r->global_batch = ROW_NUMBER("gbs"), r->micro_batch = ROW_NUMBER("mbs");
    r->t = ROW_NUMBER("t"), r->p = ROW_NUMBER("p"), r->d = ROW_NUMBER("d"), r->v = ROW_NUMBER("v");
    r->shard = ROW_NUMBER("shard");
#undef ROW_NUMBER
    const char *recompute = row_field(header, columns, fields, n, "recompute");
    const char *chunks = row_field(header, columns, fields, n, "v");
    r->recompute = strcmp(recompute, "full") == 0 || strcmp(recompute, "full?") == 0 ? LAYER_WHOLE
                   : strcmp(recompute, "selective") == 0 ? LAYER_ATTENTION : LAYER_KEEPS;
    bool kept = strcmp(recompute, "none") == 0 || strstr(recompute, "0 layers") != NULL;
    if (r->recompute == LAYER_KEEPS && !kept) return false;
    r->sequence_parallel = strcmp(row_field(header, columns, fields, n, "seq_par"), "1") == 0;
    r->scatter_gather = strcmp(row_field(header, columns, fields, n, "scatter_gather"), "0") != 0;
    r->zero = strcmp(row_field(header, columns, fields, n, "dist_opt"), "1") == 0;
    r->short_ends = strstr(row_field(header, columns, fields, n, "note"), "hold one layer fewer") != NULL;
    if (r->v == 0 && r->p && strncmp(chunks, "max: 1 layer", 12) == 0)
        r->v = (r->layers + (r->short_ends ? 2 : 0)) / r->p;
    r->schedule = r->v > 1 ? SCHEDULE_INTERLEAVED : SCHEDULE_1F1B;
    size_t multiple = 128 * (r->t ? r->t : 1);  // Megatron pads the vocabulary
    r->vocabulary = (r->vocabulary + multiple - 1) / multiple * multiple;
    row->seconds = strtod(row_field(header, columns, fields, n, "step_s"), NULL);
    bool full = r->ranks && r->layers && r->C && r->NH && r->T && r->vocabulary && r->global_batch && r->micro_batch &&
                r->t && r->p && r->d && r->v && row->seconds > 0;
    return full && r->global_batch % (r->micro_batch * r->d) == 0;  // some ran with batches that do not divide
}

// Appends the table's rows with a full layout to *rows, which is NULL or from here; free() it.
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
        else *count += row_parse(header, columns, fields, row_cut(line, fields), &(*rows)[*count]);
        line = end ? end + 1 : NULL;
    }
    free(text);
    return true;
}

#endif
