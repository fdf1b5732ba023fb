// libc.h: the part of the C library that the trainers' headers call. WebAssembly has none.
// build.sh gives this file the names of all standard headers.
//
// size_t has 64 bits, as on the trainers' machines: a model of 100 GB is counted, though it would
// not fit here.
#ifndef EXPLORER_LIBC_H
#define EXPLORER_LIBC_H

#ifdef __cplusplus
extern "C" {
#define NULL 0
#else
#define NULL ((void *)0)
#define bool _Bool
#define true 1
#define false 0
#endif

typedef unsigned long long size_t;
typedef long long ptrdiff_t, ssize_t, off_t;
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef unsigned long uintptr_t;
#define SIZE_MAX (~(size_t)0)
#define UINT64_MAX 0xffffffffffffffffULL
#define INT_MAX 2147483647
#define INT_MIN (-INT_MAX - 1)
#define PATH_MAX 4096
#define offsetof(type, field) __builtin_offsetof(type, field)

typedef __builtin_va_list va_list;
#define va_start(args, last) __builtin_va_start(args, last)
#define va_arg(args, type) __builtin_va_arg(args, type)
#define va_end(args) __builtin_va_end(args)

// The compiler's own copies count in 32 bits.
#define memcpy(to, from, count) __builtin_memcpy(to, from, (unsigned long)(count))
#define memmove(to, from, count) __builtin_memmove(to, from, (unsigned long)(count))
#define memset(to, byte, count) __builtin_memset(to, byte, (unsigned long)(count))
int memcmp(const void *a, const void *b, size_t count);
size_t strlen(const char *text);
int strcmp(const char *a, const char *b);
int strncmp(const char *a, const char *b, size_t count);
char *strcpy(char *to, const char *from);
char *strchr(const char *text, int c);
char *strrchr(const char *text, int c);
char *strstr(const char *text, const char *part);
size_t strspn(const char *text, const char *set);
size_t strcspn(const char *text, const char *set);
int isdigit(int c);
int isspace(int c);

// Memory is taken in order, and heap_reset gives all of it back at once. free does nothing, since
// all stages of a layout share lists and each stage frees them. heap_free lets malloc use a block
// again.
void *malloc(size_t bytes);
void *calloc(size_t count, size_t size);
void *reallocarray(void *memory, size_t count, size_t size);
void free(void *memory);
void heap_free(void *memory);
void qsort(void *array, size_t count, size_t size, int (*compare)(const void *, const void *));
size_t heap_mark(void);
void heap_reset(size_t mark);

extern int errno;
unsigned long long strtoull(const char *text, char **end, int base);
double strtod(const char *text, char **end);
char *getenv(const char *name);
int setenv(const char *name, const char *value, int overwrite);
void abort(void) __attribute__((noreturn));
void exit(int code) __attribute__((noreturn));  // the page throws
void _exit(int code) __attribute__((noreturn));

// stdout is dropped; stderr_text holds the text of stderr.
typedef struct FILE FILE;
extern FILE *stdout, *stderr;
extern char stderr_text[4096];
int vsnprintf(char *out, size_t size, const char *format, va_list args);
int snprintf(char *out, size_t size, const char *format, ...);
// Declared for the ramp, which the page has none of.
int sscanf(const char *text, const char *format, ...);
int fprintf(FILE *file, const char *format, ...);
int printf(const char *format, ...);
int fflush(FILE *file);
FILE *freopen(const char *path, const char *mode, FILE *file);

static inline int fputs(const char *text, FILE *file) { return fprintf(file, "%s", text); }
void tell_progress(void);  // the page's: stderr_text is a line of progress

// Time is the page's clock.
struct timespec {
    long long tv_sec, tv_nsec;
};
enum { CLOCK_MONOTONIC };
double page_seconds(void);
static inline int clock_gettime(int clock, struct timespec *now) {
    double t = page_seconds();
    now->tv_sec = (long long)t;
    now->tv_nsec = (long long)((t - (double)now->tv_sec) * 1e9);
    return clock;
}

// Math that the instructions of WebAssembly do not have is the page's.
double pow(double x, double y);
double cos(double x);
double sin(double x);
double acos(double x);
double log2(double x);
double fmod(double x, double y);
#define sqrt(x) __builtin_sqrt(x)
#define sqrtf(x) __builtin_sqrtf(x)
#define floor(x) __builtin_floor(x)
#define ceil(x) __builtin_ceil(x)
#define isnan(x) __builtin_isnan(x)
#define isinf(x) __builtin_isinf(x)
#define isfinite(x) __builtin_isfinite(x)
#define INFINITY __builtin_inff()
static inline double fmax(double x, double y) { return y > x || isnan(x) ? y : x; }
static inline double fmin(double x, double y) { return y < x || isnan(x) ? y : x; }

// Signals never come.
typedef void (*SignalHandler)(int);
#define SIG_IGN ((SignalHandler)1)
enum { SIGHUP = 1, SIGINT = 2, SIGUSR1 = 10, SIGPIPE = 13, SIGTERM = 15, SIGXFSZ = 25 };
static inline SignalHandler signal(int number, SignalHandler handler) {
    return (void)number, handler;
}
typedef unsigned sigset_t;
typedef int pthread_t;
enum { SIG_BLOCK, SIG_UNBLOCK };
struct sigaction {
    SignalHandler sa_handler;
};
static inline int sigemptyset(sigset_t *set) { return *set = 0; }
static inline int sigaddset(sigset_t *set, int number) { return *set |= 1u << number, 0; }
static inline int sigwait(const sigset_t *set, int *number) { return *number = (int)*set; }
static inline int raise(int number) { return number; }
static inline int pthread_sigmask(int how, const sigset_t *set, sigset_t *old) {
    return (void)set, (void)old, how;
}
static inline int pthread_create(pthread_t *thread, const void *attributes, void *(*run)(void *),
                                 void *argument) {
    return (void)attributes, (void)run, (void)argument, *thread = 0;
}
static inline int sigaction(int number, const struct sigaction *now, struct sigaction *old) {
    return (void)now, (void)old, number;
}
static inline int sched_yield(void) { return 0; }
enum { F_OK = 0, R_OK = 4, F_GETFD = 1, O_RDONLY = 0, O_RDWR = 2 };
static inline int fcntl(int fd, int command) { return (void)fd, command; }
static inline int open(const char *path, int flags) { return (void)path, flags; }
static inline int access(const char *path, int mode) {
    (void)path, (void)mode;
    return -1;
}

#ifdef __cplusplus
}
#endif
#endif
