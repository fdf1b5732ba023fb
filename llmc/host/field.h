// field.h: one table describes the fields of a struct. It serves the command line, --help
// and JSON files.
//
// defines: FieldType, Field, FieldTable, field_wanted, field_choice, field_set, fields_find
#ifndef LLMC_FIELD_H
#define LLMC_FIELD_H

#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum {
    FIELD_SIZE,    // size_t: decimal digits
    FIELD_SEED,    // uint64_t: decimal digits; JSON has them in a string, for its numbers
                   // stop at 2^53
    FIELD_REAL,    // double
    FIELD_WHOLE,   // double without a fraction
    FIELD_SWITCH,  // bool: 0 or 1; JSON: false or true
    FIELD_MARK,    // int: 1 if the flag is there, 2 if the word `value` follows it
    FIELD_CHOICE,  // int: position in the list `value` ("a|b|c")
    FIELD_TEXT,    // const char *; may be empty if `min` is 0; NULL: left out
    FIELD_CHARS,   // char[max], of the characters in `value`
    FIELD_TITLE,   // no field: the title of the rows below
} FieldType;

typedef struct {
    const char *name;
    FieldType type;
    size_t offset;        // in the struct
    const char *initial;  // default as text; NULL: the bytes stay 0
    double min, max;      // both included
    unsigned tags;        // bits that the table's owner gives a meaning
    const char *value;    // the list of a choice; how --help names any other value
    const char *help;
} Field;

typedef struct {
    const Field *fields;
    size_t count;
    void *object;  // the struct that `offset` counts in
} FieldTable;

// Prints the values that a field takes: "a number from 0 to 1".
static inline void field_wanted(const Field *f, char *text, size_t size) {
    switch (f->type) {
        case FIELD_SEED: snprintf(text, size, "a whole number below 2^64"); break;
        case FIELD_REAL:
            snprintf(text, size, "a number from %.15g to %.15g", f->min, f->max);
            break;
        case FIELD_SWITCH:
        case FIELD_CHOICE: snprintf(text, size, "one of %s", f->value); break;
        case FIELD_TEXT: snprintf(text, size, "a text that is not empty"); break;
        default: snprintf(text, size, "a whole number from %.0f to %.0f", f->min, f->max);
    }
}

// Returns the position of `text` in the list "a|b|c", or -1.
static inline int field_choice(const char *list, const char *text) {
    size_t length = strlen(text);
    for (int position = 0;; position++) {
        size_t end = strcspn(list, "|");
        if (end == length && strncmp(list, text, length) == 0) return position;
        if (list[end] == '\0') return -1;
        list += end + 1;
    }
}

// Sets a field of the struct from text. Returns false if the text is not a value that
// field_wanted names.
static inline bool field_set(void *object, const Field *f, const char *text) {
    void *at = (char *)object + f->offset;
    bool digits = *text && text[strspn(text, "0123456789")] == '\0';
    char *end;
    errno = 0;
    if (f->type == FIELD_SIZE || f->type == FIELD_SEED) {
        uint64_t n = strtoull(text, &end, 10);
        memcpy(at, &n, sizeof n);  // a size_t has as many bytes
        return digits && errno == 0 && (double)n >= f->min && (double)n <= f->max;
    }
    if (f->type == FIELD_REAL || f->type == FIELD_WHOLE) {
        double x = *(double *)at = strtod(text, &end);
        bool number = *text && *end == '\0' &&
                      text[strspn(text, "0123456789.eE+-")] == '\0';  // neither hex nor inf
        return number && x >= f->min && x <= f->max &&
               (f->type == FIELD_REAL || x == floor(x));
    }
    if (f->type == FIELD_SWITCH) {
        *(bool *)at = text[0] == '1';
        return strcmp(text, "0") == 0 || strcmp(text, "1") == 0;
    }
    if (f->type == FIELD_CHOICE) return (*(int *)at = field_choice(f->value, text)) >= 0;
    if (f->type == FIELD_CHARS) {
        snprintf((char *)at, (size_t)f->max, "%s", text);
        return strlen(text) < (size_t)f->max && text[strspn(text, f->value)] == '\0';
    }
    *(const char **)at = text;
    return strlen(text) >= (size_t)f->min;
}

// Finds the row of that name and the object it belongs to. Returns NULL if no table has it.
static inline const Field *fields_find(const FieldTable *tables, size_t count,
                                       const char *name, void **object) {
    for (const FieldTable *t = tables; t < tables + count; t++) {
        *object = t->object;
        for (size_t i = 0; i < t->count; i++) {
            const Field *f = &t->fields[i];
            if (f->type != FIELD_TITLE && strcmp(f->name, name) == 0) return f;
        }
    }
    return NULL;
}

#endif
