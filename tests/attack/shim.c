/* Loaded before libc (LD_PRELOAD): sees what a process does to files.

   `attack_begin(root, at, full, log)` arms it in the process that calls it. From then on each change of a file or folder
   below `root` is counted: opening for writing, each write (twice: before it, and in its middle), truncating,
   renaming, removing, making folders and links. The process is killed where a new one would be number `at`
   (0 for never); with `full`, the disk is full from that number on instead. Where `log` is a descriptor, each change goes there as a line "W operation path", wherever it is,
   and each file that is opened for reading as "R open path". */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[PATH_MAX];
static size_t root_length;
static long at;
static int full;
static int log_to = -1;
static volatile int armed;
static volatile long count;

static void die(void) {
    syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
    for (;;) pause();
}

void attack_begin(const char *folder, long number, int disk_full, int log) {
    strncpy(root, folder, sizeof root - 1);
    root_length = strlen(root);
    at = number;
    full = disk_full;
    log_to = log;
    count = 0;
    armed = 1;
}

long attack_count(void) { return count; }

/* The absolute path of `path` relative to the folder `fd`, with "." and ".." and "//" taken out; 0 if it is not known. */
static int absolute(int fd, const char *path, char *out) {
    char whole[2 * PATH_MAX];
    if (!path) return 0;
    if (path[0] == '/') {
        if (strlen(path) >= PATH_MAX) return 0;
        strcpy(whole, path);
    } else {
        char link[64], base[PATH_MAX];
        ssize_t n;
        if (fd == AT_FDCWD) strcpy(link, "/proc/self/cwd");
        else snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        n = readlink(link, base, sizeof base - 1);
        if (n < 0 || strlen(path) >= PATH_MAX) return 0;
        base[n] = 0;
        snprintf(whole, sizeof whole, "%s/%s", base, path);
    }
    size_t length = 0;
    for (const char *p = whole; *p;) {
        while (*p == '/') p++;
        const char *end = strchrnul(p, '/');
        size_t n = end - p;
        if (n == 0 || (n == 1 && p[0] == '.')) {
        } else if (n == 2 && p[0] == '.' && p[1] == '.') {
            while (length && out[--length] != '/') {}
        } else {
            if (length + n + 2 > PATH_MAX) return 0;
            out[length++] = '/';
            memcpy(out + length, p, n);
            length += n;
        }
        p = end;
    }
    if (!length) out[length++] = '/';
    out[length] = 0;
    return 1;
}

static int of_descriptor(int fd, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, out, PATH_MAX - 1);
    if (n <= 0 || out[0] != '/') return 0; /* a pipe, a socket */
    out[n] = 0;
    return 1;
}

static int below(const char *path) {
    return root_length && !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

static void note(const char *kind, const char *operation, const char *path) {
    char line[PATH_MAX + 64];
    if (log_to < 0) return;
    int n = snprintf(line, sizeof line, "%s %s %s", kind, operation, path);
    for (char *c = line; *c; c++)
        if (*c == '\n') *c = '?';
    line[n++] = '\n';
    syscall(SYS_write, log_to, line, (size_t)n);
}

/* Count one change, and die if it is the one; whether there is no room for it. */
static int change(const char *operation, const char *path) {
    if (!strncmp(path, "/dev/", 5) || !strncmp(path, "/proc/", 6)) return 0;
    note("W", operation, path);
    if (!below(path)) return 0;
    long number = __sync_add_and_fetch(&count, 1);
    if (number == at && !full) die();
    return full && at && number >= at;
}

static int change_at(const char *operation, int fd, const char *path) {
    char whole[PATH_MAX];
    int before = errno, no_room = armed && absolute(fd, path, whole) && change(operation, whole);
    errno = no_room ? ENOSPC : before;
    return no_room;
}

static int change_of(const char *operation, int fd) {
    char whole[PATH_MAX];
    int before = errno, no_room = armed && fd != log_to && fd > 2 && of_descriptor(fd, whole) && change(operation, whole);
    errno = no_room ? ENOSPC : before;
    return no_room;
}

#define REAL(type, name, ...)                                                                                          \
    static type (*real)(__VA_ARGS__);                                                                                  \
    if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name);

static int opening(int fd, const char *path, int flags) {
    char whole[PATH_MAX];
    int before = errno, no_room = 0;
    if (armed && !(flags & __O_TMPFILE) && absolute(fd, path, whole)) { /* what has no name leaves nothing */
        if ((flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC)))
            no_room = change("open", whole) && (flags & O_CREAT) && access(whole, F_OK);
        else if (!(flags & O_DIRECTORY)) note("R", "open", whole);
    }
    errno = no_room ? ENOSPC : before;
    return no_room;
}

#define MODE                                                                                                           \
    mode_t mode = 0;                                                                                                   \
    if (flags & (O_CREAT | __O_TMPFILE)) {                                                                             \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode = va_arg(rest, mode_t);                                                                                   \
        va_end(rest);                                                                                                  \
    }

int open(const char *path, int flags, ...) {
    MODE REAL(int, "open", const char *, int, ...) if (opening(AT_FDCWD, path, flags)) return -1;
    return real(path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    MODE REAL(int, "open64", const char *, int, ...) if (opening(AT_FDCWD, path, flags)) return -1;
    return real(path, flags, mode);
}
int openat(int fd, const char *path, int flags, ...) {
    MODE REAL(int, "openat", int, const char *, int, ...) if (opening(fd, path, flags)) return -1;
    return real(fd, path, flags, mode);
}
int openat64(int fd, const char *path, int flags, ...) {
    MODE REAL(int, "openat64", int, const char *, int, ...) if (opening(fd, path, flags)) return -1;
    return real(fd, path, flags, mode);
}
int creat(const char *path, mode_t mode) {
    REAL(int, "creat", const char *, mode_t) if (opening(AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC)) return -1;
    return real(path, mode);
}
int creat64(const char *path, mode_t mode) {
    REAL(int, "creat64", const char *, mode_t) if (opening(AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC)) return -1;
    return real(path, mode);
}
FILE *fopen(const char *path, const char *how) {
    REAL(FILE *, "fopen", const char *, const char *)
    if (opening(AT_FDCWD, path, strpbrk(how, "wa+") ? O_WRONLY | O_CREAT : O_RDONLY)) return NULL;
    return real(path, how);
}
FILE *fopen64(const char *path, const char *how) {
    REAL(FILE *, "fopen64", const char *, const char *)
    if (opening(AT_FDCWD, path, strpbrk(how, "wa+") ? O_WRONLY | O_CREAT : O_RDONLY)) return NULL;
    return real(path, how);
}

ssize_t write(int fd, const void *data, size_t n) {
    REAL(ssize_t, "write", int, const void *, size_t)
    if (change_of("write", fd)) return -1;
    char whole[PATH_MAX];
    if (armed && n > 1 && fd > 2 && fd != log_to && of_descriptor(fd, whole) && below(whole) && count + 1 == at) {
        ssize_t written = real(fd, data, n / 2);
        change_of("half", fd);
        return written;
    }
    if (n > 1) change_of("half", fd);
    return real(fd, data, n);
}
ssize_t writev(int fd, const struct iovec *parts, int n) {
    REAL(ssize_t, "writev", int, const struct iovec *, int) if (change_of("write", fd)) return -1;
    return real(fd, parts, n);
}
ssize_t pwrite(int fd, const void *data, size_t n, off_t where) {
    REAL(ssize_t, "pwrite", int, const void *, size_t, off_t) if (change_of("write", fd)) return -1;
    return real(fd, data, n, where);
}
ssize_t pwrite64(int fd, const void *data, size_t n, off64_t where) {
    REAL(ssize_t, "pwrite64", int, const void *, size_t, off64_t) if (change_of("write", fd)) return -1;
    return real(fd, data, n, where);
}
ssize_t copy_file_range(int from, off64_t *a, int to, off64_t *b, size_t n, unsigned flags) {
    REAL(ssize_t, "copy_file_range", int, off64_t *, int, off64_t *, size_t, unsigned) if (change_of("write", to)) return -1;
    return real(from, a, to, b, n, flags);
}
ssize_t sendfile(int to, int from, off_t *where, size_t n) {
    REAL(ssize_t, "sendfile", int, int, off_t *, size_t) if (change_of("write", to)) return -1;
    return real(to, from, where, n);
}
ssize_t sendfile64(int to, int from, off64_t *where, size_t n) {
    REAL(ssize_t, "sendfile64", int, int, off64_t *, size_t) if (change_of("write", to)) return -1;
    return real(to, from, where, n);
}

#define ON_DESCRIPTOR(name, signature, call, ...)                                                                      \
    int name signature {                                                                                               \
        REAL(int, #name, __VA_ARGS__) if (change_of(#name, fd)) return -1;                                                            \
        return real call;                                                                                              \
    }
ON_DESCRIPTOR(ftruncate, (int fd, off_t n), (fd, n), int, off_t)
ON_DESCRIPTOR(ftruncate64, (int fd, off64_t n), (fd, n), int, off64_t)

/* A kill leaves what the system has not yet written to the disk, so flushing changes nothing, and would take time. */
int fsync(int fd) { return fcntl(fd, F_GETFD) >= 0 ? 0 : -1; }
int fdatasync(int fd) { return fsync(fd); }

#define ON_PATH(name, signature, call, fd, ...)                                                                        \
    int name signature {                                                                                               \
        REAL(int, #name, __VA_ARGS__) change_at(#name, fd, path);                                                      \
        return real call;                                                                                              \
    }
ON_PATH(truncate, (const char *path, off_t n), (path, n), AT_FDCWD, const char *, off_t)
ON_PATH(unlink, (const char *path), (path), AT_FDCWD, const char *)
ON_PATH(unlinkat, (int fd, const char *path, int flags), (fd, path, flags), fd, int, const char *, int)
ON_PATH(remove, (const char *path), (path), AT_FDCWD, const char *)
ON_PATH(rmdir, (const char *path), (path), AT_FDCWD, const char *)
int mkdir(const char *path, mode_t mode) {
    struct stat found;
    REAL(int, "mkdir", const char *, mode_t)
    if (stat(path, &found) && change_at("mkdir", AT_FDCWD, path)) return -1; /* else nothing will change */
    return real(path, mode);
}
ON_PATH(mkdirat, (int fd, const char *path, mode_t mode), (fd, path, mode), fd, int, const char *, mode_t)
ON_PATH(symlink, (const char *to, const char *path), (to, path), AT_FDCWD, const char *, const char *)
ON_PATH(link, (const char *from, const char *path), (from, path), AT_FDCWD, const char *, const char *)
ON_PATH(chmod, (const char *path, mode_t mode), (path, mode), AT_FDCWD, const char *, mode_t)

int rename(const char *from, const char *path) {
    REAL(int, "rename", const char *, const char *) change_at("rename", AT_FDCWD, path);
    return real(from, path);
}
int renameat(int old, const char *from, int fd, const char *path) {
    REAL(int, "renameat", int, const char *, int, const char *) change_at("rename", fd, path);
    return real(old, from, fd, path);
}
int renameat2(int old, const char *from, int fd, const char *path, unsigned flags) {
    REAL(int, "renameat2", int, const char *, int, const char *, unsigned) change_at("rename", fd, path);
    return real(old, from, fd, path, flags);
}
