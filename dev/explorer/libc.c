// libc.c: the functions that libc.h declares.
#include "libc.h"

// ---- memory ----------------------------------------------------------------------------

extern unsigned char __heap_base;
static size_t heap_next;

size_t heap_mark(void) {
    if (!heap_next) heap_next = ((uintptr_t)&__heap_base + 15) & ~(size_t)15;
    return heap_next;
}

// Blocks that were freed, by the power of two of their size; the first word of each leads to the
// next one.
static void *spare[64];

void heap_reset(size_t mark) {
    heap_next = mark;
    memset(spare, 0, sizeof spare);
}

// Returns the exponent of the smallest power of two that holds this number of bytes.
static int power_of(size_t bytes) {
    int power = 4;
    while (power < 63 && (size_t)1 << power < bytes) power++;
    return power;
}

// Returns memory. Each block has its size, a power of two, in front of it.
void *malloc(size_t bytes) {
    int power = power_of(bytes);
    void *block = spare[power];
    if (block) return spare[power] = *(void **)block, block;
    bytes = (size_t)1 << power;
    size_t at = heap_mark() + 16, end = (at + bytes + 15) & ~(size_t)15;
    size_t pages = (size_t)__builtin_wasm_memory_size(0);
    if (bytes > 0xf0000000u || end > 0xf0000000u) return NULL;
    if (end > pages << 16) {
        size_t more = ((end + 0xffff) >> 16) - pages, spare = pages / 2;  // fewer, larger steps
        if (more < spare && pages + spare < 0xf000) more = spare;
        if (__builtin_wasm_memory_grow(0, (unsigned long)more) == ~0ul) return NULL;
    }
    heap_next = end;
    *(size_t *)(uintptr_t)(at - 16) = bytes;
    return (void *)(uintptr_t)at;
}

void *calloc(size_t count, size_t size) {
    void *memory = malloc(count * size);
    return memory ? memset(memory, 0, count * size) : NULL;
}

void *reallocarray(void *memory, size_t count, size_t size) {
    size_t bytes = count * size;
    size_t before = memory ? *(size_t *)(void *)((char *)memory - 16) : 0;
    if (bytes <= before) return memory;
    void *larger = malloc(bytes);
    if (larger && before) memcpy(larger, memory, before);
    if (larger) heap_free(memory);
    return larger;
}

void free(void *memory) { (void)memory; }

void heap_free(void *memory) {
    if (!memory) return;
    int power = power_of(*(size_t *)(void *)((char *)memory - 16));
    *(void **)memory = spare[power];
    spare[power] = memory;
}

// Merges runs of 1, 2, 4, ... elements, so that equal ones keep their order.
void qsort(void *array, size_t count, size_t size, int (*compare)(const void *, const void *)) {
    char *from = array, *other = malloc(count * size), *to = other, *swap;
    for (size_t run = 1; run < count; run *= 2, swap = from, from = to, to = swap)
        for (size_t begin = 0; begin < count; begin += 2 * run) {
            size_t middle = begin + run < count ? begin + run : count;
            size_t end = middle + run < count ? middle + run : count;
            for (size_t i = begin, j = middle, k = begin; k < end; k++) {
                bool left = j == end ||
                            (i < middle && compare(from + i * size, from + j * size) <= 0);
                memcpy(to + k * size, from + (left ? i++ : j++) * size, size);
            }
        }
    if (from != array) memcpy(array, from, count * size);
    heap_free(other);
}

// ---- text ------------------------------------------------------------------------------

int memcmp(const void *a, const void *b, size_t count) {
    const unsigned char *x = a, *y = b;
    for (size_t i = 0; i < count; i++)
        if (x[i] != y[i]) return x[i] < y[i] ? -1 : 1;
    return 0;
}

size_t strlen(const char *text) {
    size_t n = 0;
    while (text[n]) n++;
    return n;
}

int strncmp(const char *a, const char *b, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (a[i] != b[i]) return (unsigned char)a[i] < (unsigned char)b[i] ? -1 : 1;
        if (!a[i]) return 0;
    }
    return 0;
}

int strcmp(const char *a, const char *b) { return strncmp(a, b, SIZE_MAX); }

char *strcpy(char *to, const char *from) { return memcpy(to, from, strlen(from) + 1); }

char *strchr(const char *text, int c) {
    for (;; text++) {
        if (*text == (char)c) return (char *)(uintptr_t)text;
        if (!*text) return NULL;
    }
}

char *strrchr(const char *text, int c) {
    char *last = NULL;
    for (char *at = strchr(text, c); at; at = *at ? strchr(at + 1, c) : NULL) last = at;
    return last;
}

char *strstr(const char *text, const char *part) {
    size_t length = strlen(part);
    for (;; text++) {
        if (strncmp(text, part, length) == 0) return (char *)(uintptr_t)text;
        if (!*text) return NULL;
    }
}

size_t strspn(const char *text, const char *set) {
    size_t n = 0;
    while (text[n] && strchr(set, text[n])) n++;
    return n;
}

size_t strcspn(const char *text, const char *set) {
    size_t n = 0;
    while (text[n] && !strchr(set, text[n])) n++;
    return n;
}

int isdigit(int c) { return c >= '0' && c <= '9'; }
int isspace(int c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

// ---- numbers ---------------------------------------------------------------------------

int errno;

unsigned long long strtoull(const char *text, char **end, int base) {
    unsigned long long value = 0;
    errno = 0;
    for (; isdigit(*text); text++) {
        unsigned digit = (unsigned)(*text - '0');
        if (value > (~0ull - digit) / (unsigned)base) errno = 34;  // ERANGE
        value = value * (unsigned)base + digit;
    }
    *end = (char *)(uintptr_t)text;
    return errno ? ~0ull : value;
}

// Reads a number. Its last bits may be wrong: only the learning rate and its kin use it, and no
// number of the page depends on them.
double strtod(const char *text, char **end) {
    double value = 0, scale = 1;
    bool minus = *text == '-';
    if (minus) text++;
    for (; isdigit(*text); text++) value = 10 * value + (*text - '0');
    if (*text == '.')
        for (text++; isdigit(*text); text++) value = 10 * value + (*text - '0'), scale *= 10;
    if (*text == 'e') {
        char *after;
        bool negative = text[1] == '-';
        unsigned long long exponent = strtoull(text + 1 + negative, &after, 10);
        for (; exponent > 0; exponent--) {
            if (negative) scale *= 10;
            else value *= 10;
        }
        text = after;
    }
    *end = (char *)(uintptr_t)text;
    return (minus ? -value : value) / scale;
}

// ---- printing --------------------------------------------------------------------------

struct FILE {
    int number;
};
static FILE files[2];
FILE *stdout = &files[0], *stderr = &files[1];
char stderr_text[4096];

typedef struct {
    char *out;
    size_t size, length;
} Text;

static void put(Text *t, char c) {
    if (t->length + 1 < t->size) t->out[t->length] = c;
    t->length++;
}

static void put_padded(Text *t, const char *text, size_t length, size_t width, bool left,
                       char pad) {
    for (size_t i = length; i < width && !left; i++) put(t, pad);
    for (size_t i = 0; i < length; i++) put(t, text[i]);
    for (size_t i = length; i < width && left; i++) put(t, ' ');
}

// Writes the digits of a number from the end of a buffer of 64. Returns their beginning.
static char *digits_of(char *end, unsigned long long value, int least) {
    for (int i = 0; value || i < least; i++, value /= 10) *--end = (char)('0' + value % 10);
    return end;
}

// Prints like the C library's. An unknown conversion ends the program, so that no sentence is
// wrong.
int vsnprintf(char *out, size_t size, const char *format, va_list args) {
    Text t = {out, size, 0};
    for (; *format; format++) {
        if (*format != '%') {
            put(&t, *format);
            continue;
        }
        bool left = false, wide = false, negative = false, plus = false;
        char pad = ' ', buffer[64], *end = buffer + sizeof buffer, *start = end;
        size_t width = 0;
        int precision = -1;
        for (format++; *format == '-' || *format == '0' || *format == '+'; format++) {
            if (*format == '-') left = true;
            else if (*format == '+') plus = true;
            else pad = '0';
        }
        if (*format == '*') width = (size_t)va_arg(args, int), format++;
        for (; isdigit(*format); format++) width = 10 * width + (size_t)(*format - '0');
        if (*format == '.') {
            precision = 0;
            if (*++format == '*') precision = va_arg(args, int), format++;
            for (; isdigit(*format); format++) precision = 10 * precision + (*format - '0');
        }
        for (; *format == 'z' || *format == 'l'; format++)
            wide = wide || *format == 'z' || format[1] == 'l';
        if (*format == '%') {
            put(&t, '%');
        } else if (*format == 'c') {
            put(&t, (char)va_arg(args, int));
        } else if (*format == 's') {
            const char *text = va_arg(args, const char *);
            size_t length = 0;
            while (text[length] && (precision < 0 || length < (size_t)precision)) length++;
            put_padded(&t, text, length, width, left, ' ');
        } else if (*format == 'd' || *format == 'u') {
            long long value = wide             ? va_arg(args, long long)
                              : *format == 'd' ? va_arg(args, int)
                                               : (long long)va_arg(args, unsigned);
            negative = *format == 'd' && value < 0;
            start = digits_of(
                end, negative ? 0 - (unsigned long long)value : (unsigned long long)value, 1);
            if (negative) *--start = '-';
            put_padded(&t, start, (size_t)(end - start), width, left, pad);
        } else if (*format == 'f' || *format == 'g') {
            double value = va_arg(args, double), scale = 1;
            bool short_form = *format == 'g';  // of numbers that 6 decimals tell
            if (precision < 0 || short_form) precision = 6;
            for (int i = 0; i < precision; i++) scale *= 10;
            negative = value < 0;
            if (precision > 6 || !(__builtin_fabs(value) * scale < 9e18)) _exit(1);
            unsigned long long whole = (unsigned long long)(__builtin_fabs(value) * scale + 0.5);
            unsigned long long unit = (unsigned long long)scale;
            if (precision) {
                start = digits_of(end, whole % unit, precision);
                *--start = '.';
            }
            start = digits_of(start, whole / unit, 1);
            if (negative || plus) *--start = negative ? '-' : '+';
            while (short_form && end[-1] == '0') end--;
            if (short_form && end[-1] == '.') end--;
            put_padded(&t, start, (size_t)(end - start), width, left, pad);
        } else {
            _exit(1);
        }
    }
    if (size) out[t.length < size ? t.length : size - 1] = 0;
    return (int)t.length;
}

int snprintf(char *out, size_t size, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int length = vsnprintf(out, size, format, args);
    va_end(args);
    return length;
}

int fprintf(FILE *file, const char *format, ...) {
    if (file != stderr) return 0;
    if (*format == '\r')
        stderr_text[0] = 0;  // a line of progress, which replaces the one before it
    size_t before = strlen(stderr_text);
    va_list args;
    va_start(args, format);
    int length = vsnprintf(stderr_text + before, sizeof stderr_text - before, format, args);
    va_end(args);
    if (*format == '\r') tell_progress();
    return length;
}

int printf(const char *format, ...) {
    (void)format;
    return 0;
}

int fflush(FILE *file) {
    (void)file;
    return 0;
}

void abort(void) { _exit(1); }

FILE *freopen(const char *path, const char *mode, FILE *file) {
    (void)path, (void)mode;
    return file;
}

char *getenv(const char *name) {
    (void)name;
    return NULL;
}

int setenv(const char *name, const char *value, int overwrite) {
    (void)name, (void)value, (void)overwrite;
    return 0;
}
