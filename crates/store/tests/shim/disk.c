/*
 * An LD_PRELOAD shim between a test process and the C library that records operations on the files under one directory
 * and makes writes to them fail on demand.
 *
 *   DISK_ROOT    the directory; files outside are ignored
 *   DISK_RECORD  a file to which every write, truncation, sync and change of a directory is appended, in the order in
 *                which they took effect
 *   DISK_FAULTS  a file of five integers, shared with the test: how many writes succeed, how many then fail, with which
 *                error, whether half of the first failing write is written before, and whether writes hang
 *
 * A record is a struct Entry followed by its bytes; tests/shim/mod.rs reads it.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MOST_FILES 4096

struct Entry {
    uint32_t kind;
    uint32_t length;
    uint64_t file;
    uint64_t at;
};

enum { WRITE = 1, TRUNCATE = 2, SYNC = 3, CREATE = 4, RENAME = 5, UNLINK = 6, MKDIR = 7 };

struct Faults {
    volatile int32_t succeed, fail, error, half, hang;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char root[4096];
static size_t root_length;
static int record = -1;
static struct Faults *faults;
/* The inode of each open file under the directory, otherwise 0. */
static uint64_t files[MOST_FILES];

#define REAL(name) ((__typeof__(&name))real(#name))

static void *real(const char *name) {
    return dlsym(RTLD_NEXT, name);
}

__attribute__((constructor)) static void begin(void) {
    const char *at = getenv("DISK_ROOT"), *to = getenv("DISK_RECORD"), *shared = getenv("DISK_FAULTS");
    if (at == NULL || strlen(at) >= sizeof root) return;
    if (to != NULL) record = REAL(open)(to, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (shared != NULL) {
        int file = REAL(open)(shared, O_RDWR | O_CLOEXEC);
        void *memory = mmap(NULL, sizeof *faults, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (memory != MAP_FAILED) faults = memory;
    }
    strcpy(root, at);
    root_length = strlen(root);
}

static int is_inside(const char *path) {
    return root_length > 0 && strncmp(path, root, root_length) == 0;
}

static uint64_t file_of(int fd) {
    return fd >= 0 && fd < MOST_FILES ? files[fd] : 0;
}

static void append(uint32_t kind, uint64_t file, uint64_t at, const void *bytes, size_t length) {
    struct Entry entry = {kind, (uint32_t)length, file, at};
    if (record < 0) return;
    if (REAL(write)(record, &entry, sizeof entry) != (ssize_t)sizeof entry) abort();
    if (length > 0 && REAL(write)(record, bytes, length) != (ssize_t)length) abort();
}

static int opened(int fd, const char *path, int is_new) {
    struct stat found;
    if (fd < 0 || fd >= MOST_FILES) return fd;
    files[fd] = 0;
    if (!is_inside(path) || fstat(fd, &found) != 0) return fd;
    files[fd] = found.st_ino;
    if (is_new) append(CREATE, found.st_ino, 0, path, strlen(path));
    return fd;
}

static int open_file(const char *path, int flags, mode_t mode) {
    int fd, is_new;
    pthread_mutex_lock(&lock);
    is_new = (flags & O_CREAT) && access(path, F_OK) != 0;
    fd = opened(REAL(open)(path, flags, mode), path, is_new);
    pthread_mutex_unlock(&lock);
    return fd;
}

#define MODE(flags, mode)                                     \
    mode_t mode = 0;                                          \
    if ((flags) & O_CREAT) {                                  \
        va_list more;                                         \
        va_start(more, flags);                                \
        mode = (mode_t)va_arg(more, int);                     \
        va_end(more);                                         \
    }

int open(const char *path, int flags, ...) {
    MODE(flags, mode)
    return open_file(path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    MODE(flags, mode)
    return open_file(path, flags | O_LARGEFILE, mode);
}

int close(int fd) {
    int result;
    pthread_mutex_lock(&lock);
    if (fd >= 0 && fd < MOST_FILES) files[fd] = 0;
    result = REAL(close)(fd);
    pthread_mutex_unlock(&lock);
    return result;
}

/* Whether this write fails; otherwise `length` may be reduced to half. */
static int fails(size_t *length) {
    if (faults == NULL || faults->fail <= 0) return 0;
    if (faults->succeed > 0) {
        faults->succeed--;
        return 0;
    }
    if (faults->half) {
        faults->half = 0;
        *length /= 2;
        return *length == 0;
    }
    faults->fail--;
    return 1;
}

ssize_t pwrite(int fd, const void *bytes, size_t length, off_t at) {
    uint64_t file = file_of(fd);
    ssize_t written;
    if (file == 0) return REAL(pwrite)(fd, bytes, length, at);
    while (faults != NULL && faults->hang) usleep(1000);
    pthread_mutex_lock(&lock);
    if (fails(&length)) {
        pthread_mutex_unlock(&lock);
        errno = faults->error;
        return -1;
    }
    written = REAL(pwrite)(fd, bytes, length, at);
    if (written > 0) append(WRITE, file, (uint64_t)at, bytes, (size_t)written);
    pthread_mutex_unlock(&lock);
    return written;
}

ssize_t pwrite64(int fd, const void *bytes, size_t length, off64_t at) {
    return pwrite(fd, bytes, length, (off_t)at);
}

ssize_t write(int fd, const void *bytes, size_t length) {
    uint64_t file = file_of(fd);
    ssize_t written;
    if (file == 0) return REAL(write)(fd, bytes, length);
    pthread_mutex_lock(&lock);
    written = REAL(write)(fd, bytes, length);
    if (written > 0) append(WRITE, file, (uint64_t)(lseek(fd, 0, SEEK_CUR) - written), bytes, (size_t)written);
    pthread_mutex_unlock(&lock);
    return written;
}

int ftruncate(int fd, off_t length) {
    uint64_t file = file_of(fd);
    int result;
    if (file == 0) return REAL(ftruncate)(fd, length);
    pthread_mutex_lock(&lock);
    result = REAL(ftruncate)(fd, length);
    if (result == 0) append(TRUNCATE, file, (uint64_t)length, NULL, 0);
    pthread_mutex_unlock(&lock);
    return result;
}

int ftruncate64(int fd, off64_t length) {
    return ftruncate(fd, (off_t)length);
}

static int sync_file(int fd, int (*sync)(int)) {
    uint64_t file = file_of(fd);
    int result;
    if (file == 0) return sync(fd);
    pthread_mutex_lock(&lock);
    result = sync(fd);
    if (result == 0) append(SYNC, file, 0, NULL, 0);
    pthread_mutex_unlock(&lock);
    return result;
}

int fsync(int fd) {
    return sync_file(fd, REAL(fsync));
}

int fdatasync(int fd) {
    return sync_file(fd, REAL(fdatasync));
}

int rename(const char *from, const char *to) {
    int result;
    char both[8192];
    pthread_mutex_lock(&lock);
    result = REAL(rename)(from, to);
    if (result == 0 && is_inside(from) && strlen(from) + strlen(to) + 2 < sizeof both) {
        strcpy(both, from);
        strcpy(both + strlen(from) + 1, to);
        append(RENAME, 0, 0, both, strlen(from) + 1 + strlen(to));
    }
    pthread_mutex_unlock(&lock);
    return result;
}

int unlink(const char *path) {
    int result;
    pthread_mutex_lock(&lock);
    result = REAL(unlink)(path);
    if (result == 0 && is_inside(path)) append(UNLINK, 0, 0, path, strlen(path));
    pthread_mutex_unlock(&lock);
    return result;
}

int mkdir(const char *path, mode_t mode) {
    int result;
    struct stat found;
    pthread_mutex_lock(&lock);
    result = REAL(mkdir)(path, mode);
    if (result == 0 && is_inside(path) && stat(path, &found) == 0) {
        append(MKDIR, found.st_ino, 0, path, strlen(path));
    }
    pthread_mutex_unlock(&lock);
    return result;
}
