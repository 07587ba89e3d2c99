/* Load generator and its server: one thread, epoll, next to nothing per byte.
 *
 *   load serve PORT
 *   load up|down|rr|crr|idle HOST PORT CONNECTIONS SECONDS [SIZE]
 *   load paced HOST PORT CONNECTIONS SECONDS SIZE RATE
 *   load wire INTERFACE INTERFACE MICROSECONDS
 *
 * The first byte of a connection says what it is: U the server swallows, D the server sends, E the server
 * echoes. Results are one JSON object on standard output. IPv4 only. Paced requests go out at a fixed rate over open
 * connections, whatever the answers do, and are timed from when they were due. A wire passes frames between two interfaces,
 * each so late, until it is killed; it says a line when it has begun. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_packet.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { CHUNK = 256 * 1024, EVENTS = 1024, MAX_SAMPLES = 4 * 1000 * 1000 };

typedef struct {
    int fd;
    char mode;
    int connecting, ended;
    uint32_t to_send, to_receive; /* of the present message */
    uint64_t began;
} Conn;

static char buffer[CHUNK];
static int poller;
static uint32_t *samples;
static uint64_t sample_count, done_bytes, done_messages, failures;

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void die(const char *what) {
    perror(what);
    exit(1);
}

static void watch(Conn *c, int operation, uint32_t events) {
    struct epoll_event e = {.events = events, .data.ptr = c};
    if (epoll_ctl(poller, operation, c->fd, &e) < 0) die("epoll_ctl");
}

static void sample(uint64_t from) {
    if (sample_count < MAX_SAMPLES) samples[sample_count++] = (uint32_t)((now_ns() - from) / 100);
}

static void raise_limit(void) {
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
}

/* The server. */

static void serve_one(Conn *c, uint32_t events) {
    for (;;) {
        if (c->mode == 'D') {
            ssize_t n = write(c->fd, buffer, CHUNK);
            if (n < 0 && errno == EAGAIN) return;
            if (n < 0) goto close;
            continue;
        }
        if (c->mode == 'E' && c->to_send) { /* an echo that did not fit */
            ssize_t n = write(c->fd, buffer, c->to_send);
            if (n < 0 && errno == EAGAIN) return;
            if (n < 0) goto close;
            c->to_send -= (uint32_t)n;
            if (c->to_send) return;
            watch(c, EPOLL_CTL_MOD, EPOLLIN | EPOLLRDHUP);
        }
        ssize_t n = read(c->fd, buffer, c->mode ? CHUNK : 1);
        if (n < 0 && errno == EAGAIN) return;
        if (n <= 0) goto close;
        if (!c->mode) {
            c->mode = buffer[0];
            if (c->mode == 'D') watch(c, EPOLL_CTL_MOD, EPOLLOUT | EPOLLRDHUP);
            if (c->mode == 'D') memset(buffer, 'x', CHUNK);
            continue;
        }
        if (c->mode == 'E') {
            ssize_t sent = write(c->fd, buffer, (size_t)n);
            if (sent < 0 && errno != EAGAIN) goto close;
            if (sent < n) {
                c->to_send = (uint32_t)(n - (sent < 0 ? 0 : sent));
                watch(c, EPOLL_CTL_MOD, EPOLLOUT);
                return;
            }
        }
    }
close:
    (void)events;
    close(c->fd);
    free(c);
}

static void serve(int port) {
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (struct sockaddr *)&a, sizeof a) < 0 || listen(listener, 4096) < 0) die("listen");
    Conn accepting = {.fd = listener};
    watch(&accepting, EPOLL_CTL_ADD, EPOLLIN);
    struct epoll_event ready[EVENTS];
    for (;;) {
        int n = epoll_wait(poller, ready, EVENTS, -1);
        for (int i = 0; i < n; i++) {
            Conn *c = ready[i].data.ptr;
            if (c != &accepting) {
                serve_one(c, ready[i].events);
                continue;
            }
            for (int fd; (fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0;) {
                Conn *fresh = calloc(1, sizeof *fresh);
                fresh->fd = fd;
                setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                watch(fresh, EPOLL_CTL_ADD, EPOLLIN | EPOLLRDHUP);
            }
        }
    }
}

/* The client. */

static struct sockaddr_in target;

static void begin(Conn *c, char mode) {
    int one = 1;
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (c->fd < 0) die("socket");
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    c->mode = mode;
    c->connecting = 1;
    c->ended = 0;
    c->began = now_ns();
    if (connect(c->fd, (struct sockaddr *)&target, sizeof target) < 0 && errno != EINPROGRESS) die("connect");
    watch(c, EPOLL_CTL_ADD, EPOLLOUT);
}

static void restart(Conn *c) {
    struct linger hard = {.l_onoff = 0};
    setsockopt(c->fd, SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
    close(c->fd);
}

static int order(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static void report(double took) {
    qsort(samples, sample_count, sizeof *samples, order);
    double p50 = sample_count ? samples[sample_count / 2] / 10.0 : 0;
    double p99 = sample_count ? samples[sample_count * 99 / 100] / 10.0 : 0;
    printf("{\"seconds\": %.6f, \"bytes\": %llu, \"messages\": %llu, \"failures\": %llu, \"p50_us\": %.1f, "
           "\"p99_us\": %.1f}\n",
           took, (unsigned long long)done_bytes, (unsigned long long)done_messages, (unsigned long long)failures, p50,
           p99);
}

/* One request and its answer before the measurement, then the connection is idle. */
static void warm(Conn *c, uint32_t size) {
    int one = 1;
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (c->fd < 0 || connect(c->fd, (struct sockaddr *)&target, sizeof target) < 0) die("connect");
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (write(c->fd, "E", 1) != 1 || write(c->fd, buffer, size) != (ssize_t)size) die("first request");
    for (uint32_t left = size; left;) {
        ssize_t got = read(c->fd, buffer, left);
        if (got <= 0) die("first answer");
        left -= (uint32_t)got;
    }
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    watch(c, EPOLL_CTL_ADD, EPOLLIN);
}

static void paced(int count, double seconds, uint32_t size, double rate) {
    Conn *all = calloc((size_t)count, sizeof *all);
    Conn **idle = calloc((size_t)count, sizeof *idle); /* a ring: the connection that has rested longest is next */
    uint64_t head = 0, tail = 0, due = 0, sent = 0, wanted = (uint64_t)(seconds * rate);
    for (int i = 0; i < count; i++) warm(&all[i], size), idle[tail++ % (uint64_t)count] = &all[i];
    uint64_t interval = (uint64_t)(1e9 / rate), start = now_ns() + interval, give_up = 0;
    Conn timer = {.fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK)};
    struct itimerspec when = {
        .it_interval = {.tv_sec = (time_t)(interval / 1000000000u), .tv_nsec = (long)(interval % 1000000000u)},
        .it_value = {.tv_sec = (time_t)(start / 1000000000u), .tv_nsec = (long)(start % 1000000000u)},
    };
    if (timer.fd < 0 || timerfd_settime(timer.fd, TFD_TIMER_ABSTIME, &when, NULL) < 0) die("timerfd");
    watch(&timer, EPOLL_CTL_ADD, EPOLLIN);
    struct epoll_event ready[EVENTS];
    while (done_messages + failures < wanted && (!give_up || now_ns() < give_up)) {
        int n = epoll_wait(poller, ready, EVENTS, 100);
        for (int i = 0; i < n; i++) {
            Conn *c = ready[i].data.ptr;
            if (c == &timer) {
                uint64_t ticks;
                if (read(timer.fd, &ticks, sizeof ticks) == sizeof ticks) due += ticks;
                if (due >= wanted && !give_up) due = wanted, give_up = now_ns() + 2000000000u;
                continue;
            }
            ssize_t got = read(c->fd, buffer, CHUNK);
            if (got < 0 && errno == EAGAIN) continue;
            if (got <= 0 || (uint32_t)got > c->to_receive) {
                failures++;
                epoll_ctl(poller, EPOLL_CTL_DEL, c->fd, NULL);
                continue;
            }
            c->to_receive -= (uint32_t)got;
            if (c->to_receive) continue;
            done_messages++;
            sample(c->began);
            idle[tail++ % (uint64_t)count] = c;
        }
        for (; sent < due && sent < wanted && head < tail; sent++) {
            Conn *c = idle[head++ % (uint64_t)count];
            c->began = start + sent * interval;
            c->to_receive = size;
            if (write(c->fd, buffer, size) != (ssize_t)size) failures++;
        }
    }
    failures += wanted - done_messages - failures; /* what was due and not answered */
    report((double)(now_ns() - start) / 1e9);
}

typedef struct {
    uint64_t due;
    int to;
    ssize_t length;
    char *bytes;
} Frame;

static int tap(const char *name) {
    int yes = 1, fd = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK, htons(ETH_P_ALL));
    struct sockaddr_ll at = {
        .sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL), .sll_ifindex = (int)if_nametoindex(name)};
    struct packet_mreq all = {.mr_ifindex = at.sll_ifindex, .mr_type = PACKET_MR_PROMISC};
    if (fd < 0 || bind(fd, (struct sockaddr *)&at, sizeof at) < 0 ||
        /* Frames larger than any network's, and checksums that nobody has computed, pass as they are. */
        setsockopt(fd, SOL_PACKET, PACKET_VNET_HDR, &yes, sizeof yes) < 0 ||
        setsockopt(fd, SOL_PACKET, PACKET_IGNORE_OUTGOING, &yes, sizeof yes) < 0 ||
        setsockopt(fd, SOL_PACKET, PACKET_ADD_MEMBERSHIP, &all, sizeof all) < 0)
        die(name);
    return fd;
}

static void wire(const char *one, const char *other, uint64_t late_ns) {
    enum { QUEUE = 1 << 16 };
    static Frame queue[QUEUE]; /* by due time, since all are equally late */
    uint64_t first = 0, end = 0;
    struct pollfd taps[2] = {{.fd = tap(one), .events = POLLIN}, {.fd = tap(other), .events = POLLIN}};
    prctl(PR_SET_TIMERSLACK, 1);
    puts("{}"), fflush(stdout);
    for (;;) {
        uint64_t now = now_ns();
        for (; first < end && queue[first % QUEUE].due <= now; first++) {
            Frame *f = &queue[first % QUEUE];
            if (write(taps[f->to].fd, f->bytes, (size_t)f->length) < 0 && errno != ENOBUFS) die("wire");
            free(f->bytes);
        }
        struct timespec wait = {0, 0};
        if (first < end) wait.tv_nsec = (long)(queue[first % QUEUE].due - now);
        if (ppoll(taps, 2, first < end ? &wait : NULL, NULL) < 0) die("ppoll");
        for (int from = 0; from < 2; from++) {
            ssize_t length;
            while (end - first < QUEUE && (length = read(taps[from].fd, buffer, CHUNK)) > 0) {
                Frame *f = &queue[end++ % QUEUE];
                *f = (Frame){now_ns() + late_ns, !from, length, malloc((size_t)length)};
                memcpy(f->bytes, buffer, (size_t)length);
            }
        }
    }
}

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN);
    raise_limit();
    poller = epoll_create1(0);
    if (argc == 3 && !strcmp(argv[1], "serve")) serve(atoi(argv[2]));
    if (argc == 5 && !strcmp(argv[1], "wire")) wire(argv[2], argv[3], (uint64_t)atoi(argv[4]) * 1000);
    if (argc < 6) return 2;
    const char *kind = argv[1];
    int count = atoi(argv[4]);
    double seconds = atof(argv[5]);
    uint32_t size = argc > 6 ? (uint32_t)atoi(argv[6]) : 1024;
    target.sin_family = AF_INET;
    target.sin_port = htons((uint16_t)atoi(argv[3]));
    inet_pton(AF_INET, argv[2], &target.sin_addr);
    samples = malloc(sizeof *samples * MAX_SAMPLES);
    memset(buffer, 'x', CHUNK);
    if (!strcmp(kind, "paced")) {
        if (argc != 8) return 2;
        paced(count, seconds, size, atof(argv[7]));
        return 0;
    }
    int up = !strcmp(kind, "up"), down = !strcmp(kind, "down"), crr = !strcmp(kind, "crr");
    int idle = !strcmp(kind, "idle");
    char mode = up ? 'U' : down ? 'D' : 'E';
    Conn *all = calloc((size_t)count, sizeof *all);
    int opened = 0, live = 0, burst = idle ? 64 : count;
    while (opened < count && opened < burst) begin(&all[opened++], mode), live++;
    uint64_t start = now_ns(), stop = start + (uint64_t)(seconds * 1e9), measured = 0;
    int stopping = 0, ready_idle = 0;
    struct epoll_event ready[EVENTS];
    while (live) {
        uint64_t now = now_ns();
        if (!stopping && now >= stop) {
            stopping = 1;
            measured = now;
            for (int i = 0; i < opened; i++) {
                if (all[i].fd < 0) continue;
                if (up) {
                    shutdown(all[i].fd, SHUT_WR); /* the server's EOF says that everything has arrived */
                    watch(&all[i], EPOLL_CTL_MOD, EPOLLIN);
                } else {
                    close(all[i].fd), live--;
                }
            }
            if (!up) break;
        }
        if (stopping && now >= stop + 20000000000u) break;
        int n = epoll_wait(poller, ready, EVENTS, 100);
        for (int i = 0; i < n; i++) {
            Conn *c = ready[i].data.ptr;
            if (c->connecting) {
                int error = 0;
                socklen_t length = sizeof error;
                getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &length);
                if (error) {
                    failures++;
                    close(c->fd);
                    c->fd = -1;
                    live--;
                    continue;
                }
                c->connecting = 0;
                if (write(c->fd, &mode, 1) != 1) die("first byte");
                if (mode == 'E') c->to_send = size, c->to_receive = size;
                if (!crr) c->began = now_ns();
                if (down) watch(c, EPOLL_CTL_MOD, EPOLLIN);
            }
            if (up && !stopping) {
                ssize_t wrote = write(c->fd, buffer, CHUNK);
                if (wrote > 0) done_bytes += (uint64_t)wrote;
                else if (errno != EAGAIN) failures++, close(c->fd), c->fd = -1, live--;
                continue;
            }
            if (up || down) {
                ssize_t got = read(c->fd, buffer, CHUNK);
                if (got > 0) done_bytes += (uint64_t)got;
                else if (got == 0 || errno != EAGAIN) {
                    failures += got < 0 || (down && !stopping);
                    if (up) measured = now_ns();
                    close(c->fd), c->fd = -1, live--;
                }
                continue;
            }
            if (c->to_send) {
                ssize_t wrote = write(c->fd, buffer, c->to_send);
                if (wrote > 0) c->to_send -= (uint32_t)wrote;
                if (!c->to_send) watch(c, EPOLL_CTL_MOD, EPOLLIN);
                continue;
            }
            ssize_t got = read(c->fd, buffer, c->to_receive ? c->to_receive : 1);
            if (got <= 0) {
                if (got < 0 && errno == EAGAIN) continue;
                failures++;
                close(c->fd), c->fd = -1;
                if (crr && !stopping) begin(c, mode);
                else live--;
                continue;
            }
            c->to_receive -= (uint32_t)got;
            if (c->to_receive) continue;
            done_messages++;
            if (idle) {
                ready_idle++;
                if (opened < count) begin(&all[opened++], mode), live++;
                if (ready_idle == count) {
                    printf("{\"idle\": %d}\n", ready_idle), fflush(stdout);
                }
                continue;
            }
            sample(c->began);
            if (crr) {
                restart(c);
                begin(c, mode);
            } else {
                c->began = now_ns();
                c->to_send = c->to_receive = size;
                ssize_t wrote = write(c->fd, buffer, size);
                if (wrote > 0) c->to_send -= (uint32_t)wrote;
                if (c->to_send) watch(c, EPOLL_CTL_MOD, EPOLLOUT);
            }
        }
    }
    if (!measured) measured = now_ns();
    report((double)(measured - start) / 1e9);
    return 0;
}
